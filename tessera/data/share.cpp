#include "tessera/data/share.h"

#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::data {

int64_t part_begin(int64_t length, int rank, int ranks) {
  return rank * (length / ranks) + std::min<int64_t>(rank, length % ranks);
}

Division::Division(std::string owner, int64_t global_batch, std::vector<int> local_ranks, int ranks, Tail tail)
    : owner_(std::move(owner)), global_batch_(global_batch), local_ranks_(std::move(local_ranks)), ranks_(ranks), tail_(tail) {
  if (local_ranks_.empty() || std::ranges::adjacent_find(local_ranks_, std::greater_equal()) != local_ranks_.end()) {
    throw UsageError("{}: local_ranks must name at least one rank, in ascending order; give it the communicator's local_ranks()", owner_);
  }
  for (const int rank : local_ranks_) {
    if (rank < 0 || rank >= ranks) throw UsageError("{}: there is no rank {} of {}", owner_, rank, ranks);
  }
  if (global_batch < 0 || global_batch % ranks != 0) {
    throw UsageError("{}: a global batch of {} can't be divided among {} ranks; make it a multiple of {}", owner_, global_batch, ranks,
                     ranks);
  }
}

void Division::expect_size() const {
  if (global_batch_ == 0)
    throw UsageError("{}: a global batch of 0 has no samples; choose how many all ranks together take in a step", owner_);
}

void Division::expect_batch(int64_t samples) const {
  if (batches(samples) > 0) return;
  throw UsageError(
      "{}: {} samples do not fill one global batch of {}; take a smaller one, or let it be filled (without --drop-last, by Tail::Fill)",
      owner_, samples, global_batch_);
}

int64_t Division::batches(int64_t samples) const {
  const auto whole = samples / global_batch_;
  return tail_ == Tail::Drop || samples % global_batch_ == 0 ? whole : whole + 1;
}

std::vector<Share> Division::shares(int64_t samples) const {
  const bool is_even = global_batch_ > 0 && (tail_ != Tail::Keep || samples == global_batch_);
  std::vector<Share> result;
  for (const int rank : local_ranks_) {
    if (is_even) {
      const auto rows = global_batch_ / ranks_;
      result.push_back({.first = rank * rows, .rows = rows, .repeats = std::clamp<int64_t>((rank + 1) * rows - samples, 0, rows)});
      continue;
    }
    const auto first = part_begin(samples, rank, ranks_), rows = part_begin(samples, rank + 1, ranks_) - first;
    const auto weight = static_cast<double>(rows * ranks_) / static_cast<double>(samples);
    result.push_back(rows > 0 ? Share{.first = first, .rows = rows, .weight = weight} : Share{.rows = 1, .repeats = 1, .weight = 0});
  }
  if (!for_others_ && local_ranks_.size() > 1 && samples % ranks_ != 0 && !is_even) {
    throw UsageError(
        "{}: this process stands for {} ranks, whose parts of a batch must be equal, but {} samples can't be divided among {} ranks; take "
        "Tail::Drop or Tail::Fill, or batches that can be divided",
        owner_, local_ranks_.size(), samples, ranks_);
  }
  return result;
}

void Division::take_all_ranks() {
  local_ranks_.resize(static_cast<size_t>(ranks_));
  std::iota(local_ranks_.begin(), local_ranks_.end(), 0);
  for_others_ = true;
}

}  // namespace tessera::data
