// A local step that counts only if it succeeds on every rank, such as opening a shared block or writing a file.
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

/// Collects this rank's failures, and then tells all ranks whether any of them has failed.
class AllOrNone {
 public:
  /// Runs `act` and keeps an exception that it throws, so that this rank still reaches expect_all(), in which the other ranks wait.
  void attempt(c10::function_ref<void()> act);
  bool failed() const { return error_ != nullptr; }
  /// The message of the first attempt that failed, for the other ranks; empty if none did.
  const std::string& trouble() const { return trouble_; }

  /// The first rank that has failed, given the trouble() of all ranks in rank order.
  static std::optional<RankTrouble> first(std::span<const std::string> troubles);

  /// Collective. Throws on all ranks if any has failed: a failed rank throws its own error, and the other ranks throw an error of the class
  /// of the first failed rank's error: "rank 1 FAILURE: trouble of rank 1".
  void expect_all(const Communicator& world, Subject subject, std::string_view failure) const;

 private:
  std::string trouble_;
  std::exception_ptr error_;
};

/// Collective: one attempt and expect_all().
inline void all_or_none(const Communicator& world, Subject subject, std::string_view failure, c10::function_ref<void()> act) {
  AllOrNone step;
  step.attempt(act);
  step.expect_all(world, subject, failure);
}

}  // namespace tessera
