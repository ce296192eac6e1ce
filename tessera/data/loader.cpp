#include "tessera/data/loader.h"

#include <c10/core/GradMode.h>
#include <c10/util/ParallelGuard.h>
#include <fmt/format.h>

#include <atomic>

#include "tessera/base/error.h"

namespace tessera::data {

namespace {

constexpr int64_t kMostEpochs = int64_t{1} << 40;  // far from where counting them could overflow

SeededFetch without_seeds(Fetch fetch) {
  if (!fetch) return {};
  return [fetch = std::move(fetch)](std::span<const int64_t> numbers, std::span<const uint64_t>) { return fetch(numbers); };
}

}  // namespace

Loader::Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options)
    : Loader(std::move(sampler), without_seeds(std::move(fetch)), options) {}

Loader::Loader(Sampler sampler, SeededFetch fetch, const LoaderOptions& options)
    : sampler_(std::move(sampler)), fetch_(std::move(fetch)), options_(options), position_(options.start), to_fetch_(options.start) {
  if (!fetch_) throw UsageError("loader: there is no function that fetches a batch");
  if (options.workers < 0 || options.ahead < 1) {
    throw UsageError(
        fmt::format("loader: {} workers and {} batches ahead make no sense; from 0 workers, from 1 batch", options.workers, options.ahead));
  }
  expect_place(position_);
  for (int i = 0; i < options.workers; i++) workers_.emplace_back([this] { work(); });
}

void Loader::expect_place(const Position& position) const {
  if (position.epoch >= 0 && position.epoch <= kMostEpochs && position.batch >= 0 && position.batch <= batches()) return;
  throw UsageError(
      fmt::format("loader: can't start at batch {} of epoch {}, where an epoch has {}; was the position saved with another data set or "
                  "global batch?",
                  position.batch, position.epoch, batches()));
}

void Loader::seek(const Position& position) {
  expect_place(position);
  {
    const std::lock_guard lock(mutex_);
    position_ = to_fetch_ = position;
    delivered_ = begun_;  // so that workers drop what they are about to bring
    ready_.clear();
  }
  news_.notify_all();
}

void Loader::place(Place place) {
  {
    const std::lock_guard lock(mutex_);
    place_ = std::move(place);
  }
  seek(position_);  // what was fetched for the other place is fetched anew
}

Loader::~Loader() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  news_.notify_all();
  for (auto& worker : workers_) worker.join();
}

std::optional<Samples> Loader::next() {
  if (position_.batch == batches()) {
    position_ = {.epoch = position_.epoch + 1};
    return std::nullopt;
  }
  auto result = options_.workers == 0 ? make(position_, sampler_.part(position_), place_) : take_result();
  if (result.error) std::rethrow_exception(result.error);
  position_.batch++;
  static std::atomic<uint64_t> taken = 0;
  last_taken_ = ++taken;
  return std::move(result.batch);
}

Loader::Result Loader::take_result() {
  std::unique_lock lock(mutex_);
  news_.wait(lock, [this] { return ready_.contains(delivered_); });
  auto& result = ready_.at(delivered_);
  if (result.error) return result;  // a copy: the error stays for the next call
  auto taken = std::move(result);
  ready_.erase(delivered_++);
  lock.unlock();
  news_.notify_all();
  return taken;
}

Loader::Result Loader::make(const Position& position, const Part& part, const Place& place) const {
  const c10::NoGradGuard no_grad;
  try {
    auto batch = fetch_(part.numbers, part.seeds);
    batch.repeats = part.repeats;
    for (auto* const rows : {&batch.inputs, &batch.targets}) {
      if (place && rows->defined()) *rows = place(*rows);
    }
    return {.batch = std::move(batch), .error = nullptr};
  } catch (...) {
    return {.batch = {}, .error = with_context(fmt::format("batch {} of epoch {}: ", position.batch, position.epoch))};
  }
}

void Loader::work() {
  const c10::ParallelGuard alone(true);  // makes operators here run in this thread only, so that they don't compete with the model's
  std::unique_lock lock(mutex_);
  for (;;) {
    news_.wait(lock, [this] { return stopping_ || begun_ < delivered_ + options_.ahead; });
    if (stopping_) return;
    if (to_fetch_.batch == batches()) to_fetch_ = {.epoch = to_fetch_.epoch + 1};
    const auto position = to_fetch_;
    const auto number = begun_++;
    to_fetch_.batch++;
    const auto part = sampler_.part(position);
    const auto place = place_;
    lock.unlock();
    auto result = make(position, part, place);
    lock.lock();
    if (number >= delivered_) ready_.emplace(number, std::move(result));
    news_.notify_all();
  }
}

}  // namespace tessera::data
