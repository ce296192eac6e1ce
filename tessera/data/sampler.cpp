#include "tessera/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <random>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

/// A uniformly distributed number from 0 to limit - 1. std::uniform_int_distribution is not used, because its results differ between
/// standard libraries.
uint64_t draw(std::mt19937_64& source, uint64_t limit) {
  const uint64_t unfair = (UINT64_MAX % limit + 1) % limit;  // the number of highest values to reject: they would favor small results
  uint64_t value = source();
  while (value > UINT64_MAX - unfair) value = source();
  return value % limit;
}

}  // namespace

Sampler::Sampler(const SamplerOptions& options)
    : options_(options),
      division_("sampler", options.batch_sampler ? 0 : options.global_batch, options.local_ranks, options.ranks, options.tail) {
  if (options.size < 1) throw UsageError("sampler: the data set is empty");
  if (options.sampler && options.batch_sampler)
    throw UsageError("sampler: there are a sampler and a batch_sampler, but only one of them can choose the samples; leave out one");
  if (options.batch_sampler && options.global_batch != 0)
    throw UsageError("sampler: there are a global batch of {} and a batch_sampler, whose batches have their own sizes; leave out one",
                     options.global_batch);
  if (!options.batch_sampler) division_.expect_size();
  if (batches(0) == 0) division_.expect_batch(options.sampler ? std::ssize(order_) : options.size);
  const auto rest = options.batch_sampler ? 0 : options.size % options.global_batch;
  if (options.tail == Tail::Keep && !options.sampler && rest > 0) division_.shares(rest);  // throws if it can't be divided
  order_in_words_ = describe();
}

std::string Sampler::describe() const {
  std::string order;
  if (has_own_order()) {
    uint64_t print = 0;
    for (const auto number : order_) print = scramble(print ^ static_cast<uint64_t>(number));
    for (const auto end : ends_) print = scramble(print ^ static_cast<uint64_t>(end));
    order = fmt::format(", in {} of the program's own ({:016x})", options_.sampler ? "an order" : "batches", print);
  } else if (options_.order == Order::Shuffled) {
    order = fmt::format(", shuffled with seed {}", options_.seed);
  }
  const bool drops = options_.tail == Tail::Drop && !options_.batch_sampler;
  return fmt::format("{} samples{}{}", options_.size, order, drops ? ", the last dropped" : "");
}

int64_t Sampler::batches(int64_t epoch, int64_t first) {
  if (has_own_order()) arrange(epoch);
  const auto size = has_own_order() ? std::ssize(order_) : options_.size;
  if (options_.batch_sampler && first != 0) {
    throw UsageError("sampler: a batch_sampler decides where batches begin, so they can't begin after {} samples of the epoch", first);
  }
  if (options_.batch_sampler) return std::ssize(ends_);
  if (first < 0 || first > size) {
    throw UsageError(
        "sampler: epoch {} has {} samples, so no batch begins after {} of them; was the position saved with another "
        "data set?",
        epoch, size, first);
  }
  const auto rest = (size - first) % options_.global_batch;
  if (first > 0 && options_.tail == Tail::Keep && rest > 0) division_.shares(rest);  // throws if it can't be divided
  return division_.batches(size - first);
}

Part Sampler::part(const Position& position) {
  const auto count = position.epoch < 0 ? 0 : batches(position.epoch, position.first);
  if (position.batch < 0 || position.batch >= count) {
    throw UsageError("sampler: there is no batch {} in epoch {}; an epoch has {}", position.batch, position.epoch, count);
  }
  arrange(position.epoch);
  const auto size = static_cast<int64_t>(order_.size()), place = position.batch;
  const auto begin = !options_.batch_sampler ? position.first + place * options_.global_batch
                     : place == 0            ? 0
                                             : ends_[static_cast<size_t>(place) - 1];
  const auto end = !options_.batch_sampler ? std::min(begin + options_.global_batch, size) : ends_[static_cast<size_t>(place)];
  Part part{.numbers = {}, .shares = division_.shares(end - begin)};
  for (const auto& share : part.shares) {
    for (int64_t i = begin + share.first; i < begin + share.first + share.rows; i++) {
      const auto number = order_[static_cast<size_t>(i % size)];
      part.numbers.push_back(number);
      part.seeds.push_back(seed_of_sample(options_.seed, position.epoch, number));
    }
    part.repeats += share.repeats;
  }
  return part;
}

void Sampler::arrange(int64_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = -1;  // if the code below throws, no order is cached
  if (has_own_order()) {
    take_own_order(epoch);
  } else {
    order_.resize(static_cast<size_t>(options_.size));
    std::iota(order_.begin(), order_.end(), 0);
    if (options_.order == Order::Shuffled) shuffle(epoch);
  }
  epoch_ = epoch;
}

void Sampler::take_own_order(int64_t epoch) {
  if (options_.sampler) order_ = options_.sampler(epoch);
  if (options_.batch_sampler) {
    order_.clear();
    ends_.clear();
    for (const auto& batch : options_.batch_sampler(epoch)) {
      if (batch.empty()) throw UsageError("sampler: batch {} of epoch {} has no samples", ends_.size(), epoch);
      order_.insert(order_.end(), batch.begin(), batch.end());
      ends_.push_back(static_cast<int64_t>(order_.size()));
    }
  }
  const auto wrong = std::ranges::find_if(order_, [&](int64_t number) { return number < 0 || number >= options_.size; });
  if (wrong != order_.end())
    throw UsageError("sampler: epoch {} has sample {}, but the data set has {} samples", epoch, *wrong, options_.size);
  if (order_.empty()) throw UsageError("sampler: epoch {} has no samples", epoch);
}

void Sampler::shuffle(int64_t epoch) {
  const auto low = [](uint64_t value) { return static_cast<uint32_t>(value); };
  const auto number = static_cast<uint64_t>(epoch);
  // Seed and epoch are not added, because then epoch 1 of seed 0 and epoch 0 of seed 1 would have the same order.
  std::seed_seq seed{low(options_.seed), low(options_.seed >> 32), low(number), low(number >> 32)};
  std::mt19937_64 source(seed);
  for (size_t left = order_.size(); left > 1; left--) std::swap(order_[left - 1], order_[draw(source, left)]);
}

}  // namespace tessera::data
