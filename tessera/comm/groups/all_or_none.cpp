#include "tessera/comm/groups/all_or_none.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>

#include "tessera/base/error.h"

namespace tessera {
namespace {

/// The words of each rank, cut off where they are too long.
std::vector<std::string> gather_words(const Communicator& world, Subject subject, const std::string& words) {
  constexpr auto kRow = static_cast<int64_t>(AllOrNone::kMostWords);
  const auto row = at::zeros({kRow}, at::kByte);
  words.copy(reinterpret_cast<char*>(row.mutable_data_ptr<uint8_t>()), AllOrNone::kMostWords - 1);
  const auto own = row.to(world.traits().device);
  const auto whole = at::empty({kRow * world.size()}, own.options());
  world.all_gather(std::array{Piece{.whole = whole, .own = own}}, subject).wait();
  const auto rows = whole.cpu();
  std::vector<std::string> result;
  for (int r = 0; r < world.size(); r++) result.emplace_back(reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>()) + r * kRow);
  return result;
}

}  // namespace

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
    trouble_ = "threw something that is no std::exception";
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
    if (!world.traits().simulated && !world.traits().traces) found = first(gather_words(world, subject, own));
  } catch (...) {
    if (!failed()) throw;
  }
  if (failed()) std::rethrow_exception(error_);
  if (found) {
    rethrow_as(static_cast<char>(found->words.front() - '0'),
               fmt::format("rank {} {}: {}", world.world_rank(found->rank), failure, found->words.substr(1)));
  }
}

}  // namespace tessera
