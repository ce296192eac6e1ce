// What every rank does by itself and all of them or none shall have done: opening a shared block, writing a file.
#pragma once

#include <c10/util/FunctionRef.h>

#include <exception>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"

namespace tessera {

struct RankTrouble {
  int rank;
  std::string words;
};

class AllOrNone {
 public:
  /// How many bytes of a rank's trouble are worth sending where messages have a fixed size.
  static constexpr size_t kMostWords = 256;

  /// Keeps what `act` throws instead of letting it out, since this rank must come to the exchange that others wait in.
  void attempt(c10::function_ref<void()> act);
  bool failed() const { return error_ != nullptr; }
  /// What the first attempt that failed said, for the other ranks; empty if none did.
  const std::string& trouble() const { return trouble_; }

  /// The first rank in trouble, given what the ranks say in rank order.
  static std::optional<RankTrouble> first(std::span<const std::string> troubles);

  /// Collective. Where any rank has failed it throws on all: there its own error, elsewhere an IoError "rank 1 FAILURE: its words".
  void expect_all(const Communicator& world, Subject subject, std::string_view failure) const;

 private:
  std::string trouble_;
  std::exception_ptr error_;
};

}  // namespace tessera
