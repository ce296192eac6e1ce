// Calling: the function of the library that the program is in, so that an error of a collective can name the call that every rank must
// make.
#pragma once

#include <string_view>

#include "tessera/base/no_copy.h"

namespace tessera {

/// Of nested calls, the outermost is named. Its name must outlive it.
class Calling : NoCopy {
 public:
  explicit Calling(std::string_view function);
  ~Calling();

  /// Empty if this thread is in none.
  static std::string_view outermost();

 private:
  const bool is_outermost_;
};

// Parts of what ranks compare, by which an error knows which advice to add, and advice that several errors give.

/// In Subject::unit: the reduction adds to gradients that shards have kept.
inline constexpr std::string_view kEarlierGradients = "earlier gradients";
/// What Subject::writer begins with if something in no unit is trained along with the units.
inline constexpr std::string_view kBeside = "beside ";

/// In Subject::unit: memory that all units of a group share.
inline constexpr std::string_view kGradientMemory = "gradients";
inline constexpr std::string_view kSameBatches =
    "; if it has run out of batches before this rank, give all ranks the same number of them (data::Tail) or set data::LoaderOptions::join";

}  // namespace tessera
