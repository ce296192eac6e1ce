#include "tessera/comm/groups/all_or_none.h"

#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/launch_record.h"

namespace tessera {

void AllOrNone::attempt(c10::function_ref<void()> act) {
  try {
    act();
  } catch (const std::exception& error) {
    if (failed()) return;
    error_ = with_context("");
    trouble_ = first_line(error);
    if (trouble_.empty()) trouble_ = "failed without a message";
  } catch (...) {
    if (failed()) return;
    error_ = std::current_exception();
    trouble_ = "threw something that is not a std::exception";
  }
}

std::optional<RankTrouble> AllOrNone::first(std::span<const std::string> troubles) {
  for (size_t rank = 0; rank < troubles.size(); rank++) {
    if (!troubles[rank].empty()) return RankTrouble{.rank = static_cast<int>(rank), .words = troubles[rank]};
  }
  return std::nullopt;
}

void AllOrNone::expect_all(const Communicator& world, Subject subject, std::string_view failure) const {
  std::optional<RankTrouble> found;
  try {
    const auto own = failed() ? static_cast<char>('0' + class_number(error_)) + trouble_ : std::string();
    if (world.extremes(own.size(), subject).most > 0) found = first(world.texts(own, subject));
  } catch (...) {
    if (!failed()) throw;
  }
  if (failed()) std::rethrow_exception(error_);
  if (found) {
    const auto culprit = world.world_rank(found->rank);
    record_failure_in_world(world.world_rank(world.local_ranks().front()), culprit, /*in_step=*/true);
    rethrow_as(static_cast<char>(found->words.front() - '0'), fmt::format("rank {} {}: {}", culprit, failure, found->words.substr(1)));
  }
}

}  // namespace tessera
