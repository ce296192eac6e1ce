// Calling: notes which function of the library the program has called, so that an error of a collective can name the call that every rank
// must make.
#pragma once

#include <string_view>

#include "tessera/base/no_copy.h"

namespace tessera {

/// Of nested calls, the outermost is named. The name must outlive this object.
class Calling : NoCopy {
 public:
  explicit Calling(std::string_view function);
  ~Calling();

  /// The function that this thread is in; empty if it is in none.
  static std::string_view outermost();

 private:
  const bool is_outermost_;
};

// Parts of a Subject by which envelope.cpp chooses the advice in an error, and advice that several errors give.

/// Part of Subject::unit if the reduction adds to gradients that shards have kept.
inline constexpr std::string_view kEarlierGradients = "earlier gradients";
/// The beginning of Subject::writer if parameters outside all units are trained along with the units.
inline constexpr std::string_view kBeside = "beside ";

/// Part of Subject::unit for memory that all units of a group share.
inline constexpr std::string_view kGradientMemory = "gradients";
inline constexpr std::string_view kSameBatches =
    "; if it has run out of batches before this rank, give all ranks the same number of them (data::Tail) or set data::LoaderOptions::join";

}  // namespace tessera
