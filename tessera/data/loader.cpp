#include "tessera/data/loader.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <c10/util/ParallelGuard.h>
#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/data/send_samples.h"

namespace tessera::data {

namespace {

constexpr int64_t kMostEpochs = int64_t{1} << 40;  // far below numbers at which counters of epochs would overflow
constexpr auto kPatience = std::chrono::seconds(10);

std::atomic<uint64_t> newest_number = 0;  // the number that a batch or a loop was given last

SeededFetch without_seeds(Fetch fetch) {
  if (!fetch) return {};
  return [fetch = std::move(fetch)](std::span<const int64_t> numbers, std::span<const uint64_t>) { return fetch(numbers); };
}

class SampledSource : public Source {
 public:
  SampledSource(Sampler sampler, SeededFetch fetch) : sampler_(std::move(sampler)), fetch_(std::move(fetch)) {
    if (!fetch_) throw UsageError("loader: there is no function that fetches a batch");
  }

  Drawn draw(const Position& position) override {
    if (const auto count = sampler_.batches(position.epoch, position.first); position.batch >= count) return {.batches = count};
    auto part = sampler_.part(position);
    auto shares = part.shares;
    return {.make = [this, part = std::move(part)] { return fetch_(part.numbers, part.seeds); }, .shares = std::move(shares)};
  }
  std::optional<int64_t> batches(int64_t epoch) override { return sampler_.batches(epoch); }
  std::optional<int64_t> batches_behind(int64_t first, int64_t epoch) override { return sampler_.batches(epoch, first); }
  int64_t global_batch() const override { return sampler_.global_batch(); }
  int ranks() const override { return sampler_.ranks(); }
  std::string order() const override { return sampler_.order(); }
  void take_all_ranks() override { sampler_.take_all_ranks(); }

 private:
  Sampler sampler_;
  const SeededFetch fetch_;
};

std::string counted_at(const Position& position) {
  return fmt::format("batch {} of epoch {}, counted from 0: ", position.batch, position.epoch);
}

UsageError no_such_place(const Position& position, int64_t batches) {
  return UsageError(
      "loader: can't start at batch {} of epoch {}, where an epoch has {}; was the position saved with another data set or "
      "global batch?",
      position.batch, position.epoch, batches);
}

int64_t repeats_of(const std::vector<Share>& shares) {
  int64_t all = 0;
  for (const auto& share : shares) all += share.repeats;
  return all;
}

/// Sets the targets of repeated samples, which only fill the batch, to `target`. The batch has the rows of each share, one share after the
/// other.
void mark_repeats(Samples& samples, const std::vector<Share>& shares, const std::optional<int64_t>& target) {
  if (!target || !samples.targets.defined() || repeats_of(shares) == 0) return;
  expect_rows_of(shares, samples);
  if (samples.targets.is_floating_point() && *target != 0) {
    throw UsageError(
        "loader: target_of_repeats is {}, but targets are floats, of which no loss ignores a number; give 0, with which a row of shares of "
        "classes counts for nothing",
        *target);
  }
  samples.targets = samples.targets.clone();  // the tensor may be a view of the program's data
  int64_t end = 0;
  for (const auto& share : shares) {
    end += share.rows;
    samples.targets.narrow(0, end - share.repeats, share.repeats).fill_(*target);
  }
}

Samples copy_of(const Samples& samples) {
  auto copy = samples;
  for (auto* const rows : {&copy.inputs, &copy.targets}) {
    if (rows->defined()) *rows = rows->clone();
  }
  return copy;
}

void put(Samples& samples, const Place& place) {
  for (auto* const rows : {&samples.inputs, &samples.targets}) {
    if (place && rows->defined()) *rows = place(*rows);
  }
}

}  // namespace

Loader::Loader(Sampler sampler, Fetch fetch, const LoaderOptions& options)
    : Loader(std::move(sampler), without_seeds(std::move(fetch)), options) {}

Loader::Loader(Sampler sampler, SeededFetch fetch, const LoaderOptions& options)
    : Loader(std::make_unique<SampledSource>(std::move(sampler), std::move(fetch)), options) {}

Loader::Loader(Stream stream, const LoaderOptions& options) : Loader(std::make_unique<Stream>(std::move(stream)), options) {}

Loader::Loader(std::unique_ptr<Source> source, const LoaderOptions& options)
    : source_(std::move(source)), options_(options), position_(options.start), to_draw_(options.start) {
  if (!source_) throw UsageError("loader: there is no source of batches");
  if (options.workers < 0 || options.ahead < 1) {
    throw UsageError("loader: {} workers and {} batches ahead make no sense; set workers to at least 0 and ahead to at least 1",
                     options.workers, options.ahead);
  }
  if (options.dispatch && options.join)
    throw UsageError("loader: dispatch has rank 0 fetch for all ranks, and join has each rank fetch from a source of its own; choose one");
  for (const auto& group : {options.dispatch, options.join}) {
    if (group && group->local_ranks().size() > 1)
      throw UsageError(
          "loader: this process stands for all ranks, so it fetches for all of them without dispatch or join; leave these options out");
    const int ranks = group ? (options.dispatch ? group->size() : 1) : source_->ranks();
    if (source_->ranks() != ranks) {
      throw UsageError("loader: {} needs a source of {}, but this one divides batches among {}; {}", options.dispatch ? "dispatch" : "join",
                       options.dispatch ? "all ranks of the group" : "each rank's own, which knows of no others", source_->ranks(),
                       options.dispatch ? "give it their number (Trainer::make_sampler, make_stream)" : "leave ranks and local_ranks out");
    }
  }
  expect_place(position_);
  if (is_remote()) return;
  if (options.dispatch) source_->take_all_ranks();
  working_ = options.workers;
  for (int i = 0; i < options.workers; i++) workers_.emplace_back([this] { work(); });
}

int64_t Loader::global_batch() const {
  return source_->global_batch() * (options_.join ? options_.join->size() : 1);
}

std::string Loader::order() const {
  return options_.join ? fmt::format("{}, of each of {} ranks its own", source_->order(), options_.join->size()) : source_->order();
}

std::optional<int64_t> Loader::batches() {
  if (peeked_ && !peeked_->batch && !peeked_->error) return position_.batch;
  if (options_.join) return std::nullopt;
  const Position begin{.epoch = position_.epoch, .first = position_.first};
  if (!known_batches_ || known_batches_->first != begin) known_batches_.emplace(begin, count_batches(begin));
  return known_batches_->second;
}

std::optional<int64_t> Loader::batches_of_epoch(int64_t epoch) {
  if (options_.join) return std::nullopt;
  return count_batches({.epoch = epoch});
}

std::optional<int64_t> Loader::count_batches(const Position& position) {
  std::optional<int64_t> count;
  std::unique_lock lock(mutex_);
  with_source(lock, [&] {
    count = position.first == 0 ? source_->batches(position.epoch) : source_->batches_behind(position.first, position.epoch);
  });
  return count;
}

void Loader::expect_place(const Position& position) {
  if (position.epoch < 0 || position.epoch > kMostEpochs || position.batch < 0 || position.first < 0)
    throw no_such_place(position, batches().value_or(0));
  if (options_.join && position.first > 0)
    throw UsageError(
        "loader: with join, each rank has its own source, which can't resume at this position with batches of another size; take the "
        "size of the saved run");
  if (options_.join) return;  // the position may lie after the end of this rank's source, because other ranks may have more batches
  const auto count = count_batches(position);
  if (count && position.batch > *count) throw no_such_place(position, *count);
}

Position Loader::place_of(const Position& position, int64_t global_batch) {
  const auto own = this->global_batch();
  if (global_batch == own) return position;
  const auto samples = position.first + position.batch * global_batch;
  Position place{.epoch = position.epoch};
  if (position.batch == 0 && position.first == 0) return place;
  if (own == 0 || global_batch == 0) {
    throw UsageError("loader: the position counts batches of {}, but this loader has batches of {}, so it can't resume there",
                     global_batch == 0 ? "any size" : std::to_string(global_batch), own == 0 ? "any size" : std::to_string(own));
  }
  if (position.first == 0 && samples % own == 0) {
    place.batch = std::min(samples / own, batches_of_epoch(place.epoch).value_or(samples / own));
  } else {
    place.first = samples;
  }
  expect_place(place);
  return place;
}

uint64_t Loader::newest() {
  return newest_number;
}

Loop Loader::loop() {
  std::erase_if(loops_, [](const auto& loop) { return loop.expired(); });
  auto loop = std::make_shared<const uint64_t>(++newest_number);
  loops_.push_back(loop);
  return loop;
}

uint64_t Loader::open_loop() const {
  uint64_t innermost = 0;
  for (const auto& each : loops_) {
    if (const auto loop = each.lock()) innermost = std::max(innermost, *loop);
  }
  return innermost;
}

void Loader::seek(const Position& position, const Taken& taken) {
  const bool is_there = position == position_ && !(peeked_ && peeked_->error);  // then the batches fetched in advance stay valid
  if (!is_there) restart(position);
  taken_ = taken;
}

void Loader::restart(const Position& position) {
  expect_place(position);
  peeked_.reset();
  has_run_out_ = false;
  {
    const std::lock_guard lock(mutex_);
    position_ = to_draw_ = position;
    delivered_ = begun_;  // so that workers drop the batches that they are fetching
    ready_.clear();
    has_failed_ = false;
  }
  news_.notify_all();
}

void Loader::place(Place place) {
  std::unique_lock lock(mutex_);
  const bool is_first = !place_;
  place_ = std::move(place);
  lock.unlock();
  if (is_first && !peeked_) return;  // batches that were fetched before are placed when they are taken
  spare_ = {};
  restart(position_);  // fetches again the batches that the earlier function has placed
}

Loader::~Loader() {
  std::unique_lock lock(mutex_);
  stopping_ = true;
  const bool is_drawing = is_drawing_;
  lock.unlock();
  news_.notify_all();
  try {
    if (is_drawing) source_->interrupt();
  } catch (const std::exception& error) {
    log(LogLevel::Error, "StreamOptions::interrupt has failed: {}", first_line(error));
  }
  lock.lock();
  while (!news_.wait_for(lock, kPatience, [this] { return working_ == 0; })) {
    log(LogLevel::Warning, "the destructor of a Loader waits for {}, which has not returned yet; {}",
        is_drawing_ ? fmt::format("its source ({})", source_->order()) : "the function that fetches a batch",
        is_drawing_ ? "set StreamOptions::interrupt, which makes a blocked pull return" : "nothing can end that function from outside");
  }
  lock.unlock();
  for (auto& worker : workers_) worker.join();
}

bool Loader::at_end() {
  // With dispatch, only rank 0 may know the number of batches. It calls peek() nevertheless, because the other ranks do, and peek() is
  // collective.
  const auto count = options_.dispatch ? std::nullopt : batches();
  return count ? position_.batch == *count : !peek().batch && !peek().error;
}

std::optional<Samples> Loader::next() {
  if (const auto& result = peek(); result.error) std::rethrow_exception(result.error);
  auto result = *std::exchange(peeked_, std::nullopt);
  if (!result.batch) {
    position_ = {.epoch = position_.epoch + 1};
    taken_ = {};
    return std::nullopt;
  }
  position_.batch++;
  taken_ = {.number = ++newest_number, .weight = result.batch->weight, .loop = open_loop()};
  return std::move(result.batch);
}

const Loader::Result& Loader::peek() {
  if (peeked_) return *peeked_;
  try {
    peeked_ = options_.dispatch ? receive() : options_.join ? join() : take_own();
    if (!peeked_->batch && !peeked_->error && position_.batch == 0 && position_.first == 0)
      throw UsageError("loader: epoch {} has no batches; has the source any samples?", position_.epoch);
  } catch (...) {
    peeked_ = {.error = std::current_exception()};
  }
  return *peeked_;
}

Loader::Result Loader::take_own() {
  std::unique_lock lock(mutex_);
  if (workers_.empty()) {
    make_next(lock);
  } else {
    news_.wait(lock, [this] { return ready_.contains(delivered_); });
  }
  auto taken = std::move(ready_.at(delivered_));
  ready_.erase(delivered_++);
  const auto place = place_;
  lock.unlock();
  news_.notify_all();
  if (taken.batch && !taken.is_placed) put_at(taken, place, position_);
  return taken;
}

/// If rank 0 fails to fetch, all ranks get the error, so that they all stay at that batch.
Loader::Result Loader::receive() {
  const auto& world = *options_.dispatch;
  Result whole;
  all_or_none(world, {.unit = "dispatch"}, "could not fetch a batch for all ranks", [&] {
    if (is_remote()) return;
    whole = take_own();
    if (whole.error) std::rethrow_exception(whole.error);
    if (whole.batch) expect_rows_of(whole.shares, *whole.batch);
  });
  auto own = send_samples(world, whole.batch, whole.shares);
  Result result{.batch = std::move(own)};
  if (result.batch && place_) put_at(result, place_, position_);
  return result;
}

Loader::Result Loader::join() {
  const auto& ranks = *options_.join;
  Result own;
  AllOrNone step;
  step.attempt([&] {
    if (has_run_out_) return;
    own = take_own();
    if (own.error) std::rethrow_exception(own.error);
    has_run_out_ = !own.batch;
    if (has_run_out_ && !spare_.inputs.defined()) spare_ = first_of_epoch();
  });
  step.expect_all(ranks, {.unit = "join"}, "could not fetch a batch");
  const auto rows = own.batch ? own.batch->size() - own.batch->repeats : 0;
  int64_t all = 0;
  for (const auto& text : ranks.texts(std::to_string(rows), {.unit = "join"})) all += std::stoll(text);
  if (all == 0) {
    has_run_out_ = false;
    return {};
  }
  // Copies, because a program may change the batches that it gets.
  if (!own.batch) {
    own.batch = copy_of(spare_);
    own.batch->repeats = spare_.size();
    mark_repeats(*own.batch, {{.rows = spare_.size(), .repeats = spare_.size()}}, options_.target_of_repeats);
  } else if (!spare_.inputs.defined()) {
    spare_ = copy_of(*own.batch);
  }
  own.batch->weight = static_cast<double>(rows * ranks.size()) / static_cast<double>(all);
  return own;
}

/// Returns the first batch of the epoch, for a rank that resumes after the end of its own source and has no batch to repeat.
Samples Loader::first_of_epoch() {
  const Position first = {.epoch = position_.epoch};
  std::unique_lock lock(mutex_);
  const auto attempt = draw(first, lock);
  lock.unlock();
  auto result = make(first, attempt, place_);
  if (result.error) std::rethrow_exception(result.error);
  if (!result.batch) throw UsageError("loader: with join, the source of each rank must have samples, but this rank's has none");
  return std::move(*result.batch);
}

void Loader::put_at(Result& result, const Place& place, const Position& position) {
  const c10::NoGradGuard no_grad;
  try {
    put(*result.batch, place);
  } catch (...) {
    result = {.error = with_context(counted_at(position))};
  }
}

Loader::Attempt Loader::draw(const Position& position, std::unique_lock<std::mutex>& lock) {
  Attempt attempt;
  with_source(lock, [&] {
    const c10::NoGradGuard no_grad;
    try {
      attempt.drawn = source_->draw(position);
    } catch (...) {
      attempt.error = std::current_exception();
    }
  });
  return attempt;
}

Loader::Result Loader::make(const Position& position, const Attempt& attempt, const Place& place) const {
  const c10::NoGradGuard no_grad;
  const auto& drawn = attempt.drawn;
  try {
    if (attempt.error) std::rethrow_exception(attempt.error);
    if (!drawn.make) {
      if (drawn.batches && position.batch > *drawn.batches && !options_.join) throw no_such_place(position, *drawn.batches);
      return {};
    }
    if (drawn.shares.empty())
      throw UsageError("the source has returned a batch without shares; Drawn::shares must have one for each local rank");
    Result result{.batch = drawn.make(), .shares = drawn.shares, .is_placed = place && !options_.dispatch};
    result.batch->repeats = repeats_of(drawn.shares);
    result.batch->weight = drawn.shares.front().weight;
    mark_repeats(*result.batch, drawn.shares, options_.target_of_repeats);
    if (result.is_placed) put(*result.batch, place);
    return result;
  } catch (...) {
    return {.error = with_context(counted_at(position))};
  }
}

/// Waits until no other thread uses the source, and then calls `act` without the lock.
void Loader::with_source(std::unique_lock<std::mutex>& lock, c10::function_ref<void()> act) {
  news_.wait(lock, [this] { return !is_drawing_; });
  is_drawing_ = true;
  lock.unlock();
  struct Done {
    Loader& loader;
    std::unique_lock<std::mutex>& lock;
    ~Done() {
      lock.lock();
      loader.is_drawing_ = false;
      loader.news_.notify_all();
    }
  } const done{*this, lock};
  act();
}

void Loader::work() {
  const c10::ParallelGuard alone(true);  // makes operators here run in this thread only, so that they don't compete with the model's
  std::unique_lock lock(mutex_);
  for (;;) {
    news_.wait(lock, [this] { return stopping_ || (!is_drawing_ && !has_failed_ && begun_ < delivered_ + options_.ahead); });
    if (stopping_) break;
    make_next(lock);
  }
  working_--;
  news_.notify_all();
}

void Loader::make_next(std::unique_lock<std::mutex>& lock) {
  const auto number = begun_++;
  const auto position = to_draw_;
  const auto place = place_;
  to_draw_.batch++;
  const auto attempt = draw(position, lock);
  if (number < delivered_) return;
  has_failed_ = attempt.error != nullptr;
  if (!has_failed_ && !attempt.drawn.make) to_draw_ = {.epoch = position.epoch + 1};
  lock.unlock();
  auto result = make(position, attempt, place);
  lock.lock();
  if (number >= delivered_) ready_.emplace(number, std::move(result));
  news_.notify_all();
}

}  // namespace tessera::data
