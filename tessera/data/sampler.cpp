#include "tessera/data/sampler.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <numeric>
#include <random>
#include <sstream>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

/// A uniformly distributed number from 0 to limit - 1. std::uniform_int_distribution is not used, because its results differ between
/// standard libraries.
uint64_t draw(std::mt19937_64& source, uint64_t limit) {
  const uint64_t unfair = (UINT64_MAX % limit + 1) % limit;  // as many of the highest values are rejected: they would favor small results
  uint64_t value = source();
  while (value > UINT64_MAX - unfair) value = source();
  return value % limit;
}

/// The finalizer of splitmix64: changes every bit with the chance of one half if one bit of the value changes.
uint64_t scramble(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

uint64_t seed_of_sample(uint64_t seed, int64_t epoch, int64_t number) {
  return scramble(scramble(scramble(seed) ^ static_cast<uint64_t>(epoch)) ^ static_cast<uint64_t>(number));
}

constexpr const char* kPositionFormat = "position-1";

}  // namespace

std::string Position::save() const {
  return fmt::format("{} {} {}", kPositionFormat, epoch, batch);
}

Position Position::load(const std::string& text) {
  std::istringstream in(text);
  std::string format, more;
  Position position;
  in >> format >> position.epoch >> position.batch;
  if (!in || format != kPositionFormat || position.epoch < 0 || position.batch < 0 || in >> more) {
    throw UsageError(fmt::format("'{}' describes no position in a data set", text));
  }
  return position;
}

Sampler::Sampler(const SamplerOptions& options) : options_(options) {
  if (options.local_ranks.empty() || std::ranges::adjacent_find(options.local_ranks, std::greater_equal()) != options.local_ranks.end()) {
    throw UsageError("sampler: local_ranks must name at least one rank, in ascending order; give it the communicator's local_ranks()");
  }
  for (const int rank : options.local_ranks) {
    if (rank < 0 || rank >= options.ranks) throw UsageError(fmt::format("sampler: there is no rank {} of {}", rank, options.ranks));
  }
  if (options.global_batch < 1 || options.global_batch % options.ranks != 0) {
    throw UsageError(fmt::format("sampler: a global batch of {} can't be divided among {} ranks; make it a multiple of {}",
                                 options.global_batch, options.ranks, options.ranks));
  }
  if (options.size < 1) throw UsageError("sampler: the data set is empty");
  const auto whole = options.size / options.global_batch;
  batches_ = options.tail == Tail::Drop ? whole : whole + (options.size % options.global_batch != 0 ? 1 : 0);
  if (batches_ == 0) {
    throw UsageError(fmt::format("sampler: {} samples do not fill one global batch of {}; take a smaller one, or Tail::Fill", options.size,
                                 options.global_batch));
  }
  order_.resize(static_cast<size_t>(options.size));
}

std::string Sampler::order() const {
  return fmt::format("{} samples{}{}", options_.size,
                     options_.order == Order::Shuffled ? fmt::format(", shuffled with seed {}", options_.seed) : "",
                     options_.tail == Tail::Drop ? ", the last dropped" : "");
}

Part Sampler::part(const Position& position) {
  if (position.epoch < 0 || position.batch < 0 || position.batch >= batches_) {
    throw UsageError(fmt::format("sampler: there is no batch {} in epoch {}; an epoch has {}", position.batch, position.epoch, batches_));
  }
  if (position.epoch != epoch_) arrange(position.epoch);
  const auto count = options_.global_batch / options_.ranks;
  Part part;
  for (const int rank : options_.local_ranks) {
    const auto first = position.batch * options_.global_batch + rank * count;
    for (int64_t place = first; place < first + count; place++) {
      const auto number = order_[static_cast<size_t>(place % options_.size)];
      part.numbers.push_back(number);
      part.seeds.push_back(seed_of_sample(options_.seed, position.epoch, number));
      if (place >= options_.size) part.repeats++;
    }
  }
  return part;
}

void Sampler::arrange(int64_t epoch) {
  std::iota(order_.begin(), order_.end(), 0);
  epoch_ = epoch;
  if (options_.order == Order::AsStored) return;
  const auto low = [](uint64_t value) { return static_cast<uint32_t>(value); };
  const auto number = static_cast<uint64_t>(epoch);
  // Seed and epoch are not added, because then epoch 1 of seed 0 and epoch 0 of seed 1 would have the same order.
  std::seed_seq seed{low(options_.seed), low(options_.seed >> 32), low(number), low(number >> 32)};
  std::mt19937_64 source(seed);
  for (size_t left = order_.size(); left > 1; left--) std::swap(order_[left - 1], order_[draw(source, left)]);
}

}  // namespace tessera::data
