#include "tessera/data/stream.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

/// Copies the samples, because the function that pulls may reuse its memory.
Samples concatenated(const std::vector<Samples>& parts) {
  std::vector<at::Tensor> inputs, targets;
  for (const auto& part : parts) {
    inputs.push_back(part.inputs);
    if (part.targets.defined()) targets.push_back(part.targets);
  }
  return {.inputs = at::cat(inputs), .targets = targets.empty() ? at::Tensor() : at::cat(targets)};
}

Samples narrowed(const Samples& samples, int64_t first, int64_t count) {
  return {.inputs = samples.inputs.narrow(0, first, count),
          .targets = samples.targets.defined() ? samples.targets.narrow(0, first, count) : at::Tensor()};
}

}  // namespace

Stream::Stream(StreamOptions options)
    : options_(std::move(options)), division_("stream", options_.global_batch, options_.local_ranks, options_.ranks, options_.tail) {
  if (!options_.open) throw UsageError("stream: there is no function that opens it; set StreamOptions::open");
  division_.expect_size();
}

std::string Stream::order() const {
  return fmt::format("{}{}", options_.name, options_.tail == Tail::Drop ? ", the last samples dropped" : "");
}

Drawn Stream::draw(const Position& position) try {
  go_to(position);
  const auto count = fill();
  const auto number = next_->batch;
  if (number == 0 && position.first == 0 && count > 0) division_.expect_batch(count);
  if (count == 0 || division_.batches(count) == 0) return {.batches = number};
  const auto shares = division_.shares(count);
  std::vector<Samples> parts;
  std::vector<uint64_t> seeds;
  for (const auto& share : shares) {
    for (int64_t i = share.first; i < share.first + share.rows;) {  // after the end, the first samples of the epoch follow
      const auto begin = i < count ? i : (i - count) % first_.size();
      const auto rest = i < count ? count - i : first_.size() - begin;
      const auto taken = std::min(rest, share.first + share.rows - i);
      parts.push_back(i < count ? rows(begin, taken) : narrowed(first_, begin, taken));
      const auto before = i < count ? position.first + number * division_.global_batch() : 0;
      for (int64_t k = begin; k < begin + taken; k++) seeds.push_back(seed_of_sample(options_.seed, position.epoch, before + k));
      i += taken;
    }
  }
  auto samples = concatenated(parts);
  drop(count);
  auto make = [samples = std::move(samples), seeds = std::move(seeds), transform = options_.transform] {
    return transform ? transform(samples, seeds) : samples;
  };
  return {.make = std::move(make), .shares = shares};
} catch (...) {
  next_.reset();  // after an error, it is unknown where the stream is
  throw;
}

void Stream::go_to(const Position& position) {
  if (!next_ || position.epoch != next_->epoch || position.first != next_->first || position.batch < next_->batch)
    begin(position.epoch, position.first);
  while (next_->batch < position.batch) {
    const auto count = fill();
    if (count == 0 || division_.batches(count) == 0) return;
    drop(count);
  }
}

void Stream::begin(int64_t epoch, int64_t first) {
  next_.reset();
  waiting_.clear();
  are_waiting_ = 0;
  first_ = {};
  has_ended_ = false;
  has_targets_.reset();
  pull_ = {};  // closes the stream before it is opened again, because some sources can be open only once
  pull_ = options_.open(epoch);
  if (!pull_) throw UsageError("stream: StreamOptions::open returned no function that pulls samples of epoch {}", epoch);
  next_ = Position{.epoch = epoch, .first = first};
  for (auto left = first; left > 0;) {
    const auto count = std::min(fill(), left);
    if (count == 0)
      throw UsageError("stream: epoch {} ends after {} samples, so no batch begins after {}; was the position saved with another stream?",
                       epoch, first - left, first);
    drop_rows(count);
    left -= count;
  }
}

void Stream::expect_rows(const Samples& pulled) {
  if (!pulled.inputs.defined() || pulled.inputs.dim() == 0 || pulled.size() == 0)
    throw UsageError("stream: pull returned samples without a row; at the end of the stream it must return nothing");
  const bool has_targets = pulled.targets.defined();
  if (has_targets && (pulled.targets.dim() == 0 || pulled.targets.size(0) != pulled.size()))
    throw UsageError("stream: pull returned {} rows of inputs, but targets of sizes {}", pulled.size(), c10::str(pulled.targets.sizes()));
  if (has_targets_.value_or(has_targets) != has_targets)
    throw UsageError("stream: pull returned targets for some samples, and none for others");
  has_targets_ = has_targets;
}

int64_t Stream::fill() {
  while (!has_ended_ && are_waiting_ < division_.global_batch()) {
    auto pulled = pull_();
    has_ended_ = !pulled;
    if (has_ended_) break;
    expect_rows(*pulled);
    are_waiting_ += pulled->size();
    waiting_.push_back(std::move(*pulled));
  }
  const auto count = std::min(are_waiting_, division_.global_batch());
  if (!first_.inputs.defined() && count > 0 && division_.tail() == Tail::Fill) first_ = rows(0, count);
  return count;
}

Samples Stream::rows(int64_t first, int64_t count) const {
  std::vector<Samples> parts;
  for (const auto& chunk : waiting_) {
    const auto size = chunk.size();
    if (first < size && count > 0) {
      const auto taken = std::min(size - first, count);
      parts.push_back(narrowed(chunk, first, taken));
      count -= taken;
    }
    first = std::max<int64_t>(first - size, 0);
  }
  return concatenated(parts);
}

void Stream::drop(int64_t count) {
  drop_rows(count);
  next_->batch++;
}

void Stream::drop_rows(int64_t count) {
  are_waiting_ -= count;
  while (count > 0) {
    auto& chunk = waiting_.front();
    const auto size = chunk.size();
    if (count < size) {
      chunk = narrowed(chunk, count, size - count);
      return;
    }
    count -= size;
    waiting_.pop_front();
  }
}

}  // namespace tessera::data
