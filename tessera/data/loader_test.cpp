#include "tessera/data/loader.h"

#include <ATen/ATen.h>
#include <c10/core/GradMode.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::data::loader_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using Numbers = std::vector<int64_t>;

const SamplerOptions kSamples = {.size = 103, .global_batch = 10, .seed = 1};

Samples as_tensor(std::span<const int64_t> numbers) {
  const auto tensor = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
  std::ranges::copy(numbers, tensor.data_ptr<int64_t>());
  return {.inputs = tensor, .targets = tensor};
}

Numbers numbers_in(const Samples& samples) {
  const auto* const start = samples.inputs.const_data_ptr<int64_t>();
  return {start, start + samples.size()};
}

/// Takes its time for every third batch, so that workers overtake each other.
Samples unevenly(std::span<const int64_t> numbers) {
  if (numbers.front() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  return as_tensor(numbers);
}

std::vector<Numbers> epoch_of(Loader& loader) {
  std::vector<Numbers> batches;
  while (const auto batch = loader.next()) batches.push_back(numbers_in(*batch));
  return batches;
}

std::vector<Numbers> by_sampler(int64_t epoch) {
  Sampler sampler(kSamples);
  std::vector<Numbers> batches;
  for (int64_t batch = 0; batch < sampler.batches(); batch++) batches.push_back(sampler.part({.epoch = epoch, .batch = batch}).numbers);
  return batches;
}

class WithWorkers : public ::testing::TestWithParam<int> {};

TEST_P(WithWorkers, PutsBatchesWhereTheyAreWanted) {
  Loader loader{Sampler(kSamples), as_tensor, {.workers = GetParam()}};
  const auto batches = by_sampler(0);
  EXPECT_EQ(numbers_in(*loader.next()), batches[0]);
  loader.place([](const at::Tensor& rows) { return rows + 1000; });  // batches have been fetched before this call
  for (size_t i = 1; i < batches.size(); i++) {
    const auto batch = *loader.next();
    EXPECT_EQ(numbers_in({.inputs = batch.inputs - 1000, .targets = {}}), batches[i]);
    EXPECT_TRUE(at::equal(batch.inputs, batch.targets));
  }
  loader.place([](const at::Tensor&) -> at::Tensor { throw IoError("no room"); });
  EXPECT_FALSE(loader.next());
  EXPECT_THAT(message_of<IoError>([&] { loader.next(); }), HasSubstr("batch 0 of epoch 1, counted from 0: no room"));
}

TEST_P(WithWorkers, DeliversInTheSamplersOrder) {
  Loader loader{Sampler(kSamples), unevenly, {.workers = GetParam()}};
  EXPECT_EQ(loader.batches(), 10);
  for (const int64_t epoch : {0, 1, 2}) {
    EXPECT_EQ(loader.position(), (Position{.epoch = epoch}));
    EXPECT_EQ(epoch_of(loader), by_sampler(epoch));
  }
}

TEST_P(WithWorkers, GoesOnWhereAnotherLeftOff) {
  for (const int64_t taken : {0, 4, 9, 10}) {
    Loader first{Sampler(kSamples), unevenly, {.workers = GetParam(), .start = {.epoch = 1}}};
    for (int64_t i = 0; i < taken; i++) first.next();
    Loader second{Sampler(kSamples), unevenly, {.workers = GetParam(), .start = first.position()}};
    EXPECT_EQ(second.position(), (Position{.epoch = 1, .batch = taken}));
    const auto whole = by_sampler(1);
    EXPECT_EQ(epoch_of(second), std::vector<Numbers>(whole.begin() + taken, whole.end()));
    EXPECT_EQ(epoch_of(second), by_sampler(2));
  }
}

TEST_P(WithWorkers, GoesOnInBatchesOfAnotherSize) {
  auto samples = kSamples;
  samples.tail = Tail::Keep;
  const auto all_of = [](const std::vector<Numbers>& batches) {
    Numbers all;
    for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
    return all;
  };
  Loader whole{Sampler(samples), unevenly, {.workers = GetParam(), .start = {.epoch = 1}}};
  const auto expected = all_of(epoch_of(whole)), after = all_of(epoch_of(whole));
  Position position{.epoch = 1};
  Numbers seen;
  int64_t size = 10;  // of the batches that the position counts
  for (const int64_t next : {10, 7, 20, 3}) {
    samples.global_batch = next;
    Loader loader{Sampler(samples), unevenly, {.workers = GetParam()}};
    position = loader.place_of(position, std::exchange(size, next));
    loader.seek(position);
    const auto taken = std::ssize(seen);
    EXPECT_EQ(loader.batches(), (103 - taken + next - 1) / next);
    EXPECT_EQ(loader.batches_of_epoch(1), (103 + next - 1) / next);
    for (int i = 0; i < 2 || next == 3; i++) {
      const auto batch = loader.next();
      if (!batch) break;
      const auto numbers = numbers_in(*batch);
      seen.insert(seen.end(), numbers.begin(), numbers.end());
    }
    position = Position::load(loader.position().save());
    EXPECT_EQ(position, loader.position());
    if (next == 3) {
      EXPECT_EQ(position, Position{.epoch = 2});
      EXPECT_EQ(all_of(epoch_of(loader)), after);
    }
  }
  EXPECT_EQ(seen, expected);
  Loader loader{Sampler(samples), unevenly, {.workers = GetParam()}};
  EXPECT_EQ(loader.place_of({.epoch = 1, .batch = 2}, 6), (Position{.epoch = 1, .batch = 4}));
  loader.seek({.epoch = 1, .first = 103});  // nothing is left
  EXPECT_TRUE(loader.at_end());
  EXPECT_FALSE(loader.next());
  EXPECT_THAT(message_of<UsageError>([&] { loader.seek({.first = 104}); }), HasSubstr("epoch 0 has 103 samples"));
}

TEST_P(WithWorkers, IteratesOverAnEpoch) {
  Loader loader{Sampler(kSamples), as_tensor, {.workers = GetParam()}};
  std::vector<Numbers> batches;
  for (auto& batch : loader) batches.push_back(numbers_in(batch));
  EXPECT_EQ(batches, by_sampler(0));
  EXPECT_EQ(loader.position(), Position{.epoch = 1});
}

TEST_P(WithWorkers, ThrowsWhatFetchThrowsAtTheBatchThatItBelongsTo) {
  const auto bad = by_sampler(0)[3].front();
  const auto fetch = [bad](std::span<const int64_t> numbers) {
    if (numbers.front() == bad) throw IoError("image 17 is torn");
    return as_tensor(numbers);
  };
  Loader loader{Sampler(kSamples), fetch, {.workers = GetParam()}};
  for (int i = 0; i < 3; i++) EXPECT_TRUE(loader.next().has_value());
  for (int i = 0; i < 2; i++) {
    EXPECT_EQ(message_of<IoError>([&] { loader.next(); }), "batch 3 of epoch 0, counted from 0: image 17 is torn");
    EXPECT_EQ(loader.position(), (Position{.batch = 3}));
  }
}

TEST_P(WithWorkers, SaysWhatOnlyFillsABatch) {
  auto samples = kSamples;
  samples.tail = Tail::Fill;
  Loader loader{Sampler(samples), as_tensor, {.workers = GetParam()}};
  int64_t counted = 0;
  for (auto& batch : loader) counted += batch.size() - batch.repeats;
  EXPECT_EQ(counted, samples.size);
}

TEST_P(WithWorkers, MarksWhatOnlyFillsABatch) {
  // Batches of six, of which this process has the last two ranks: of the second batch three or four samples are left.
  for (const auto& [size, targets] : {std::pair<int64_t, std::vector<int64_t>>{10, {8, 9, -100, -100}}, {9, {8, -100, -100, -100}}}) {
    const SamplerOptions samples{
        .size = size, .global_batch = 6, .local_ranks = {1, 2}, .ranks = 3, .order = Order::AsStored, .tail = Tail::Fill};
    Loader loader{Sampler(samples), as_tensor, {.workers = GetParam(), .target_of_repeats = -100}};
    EXPECT_TRUE(at::equal(loader.next()->targets, at::tensor({2, 3, 4, 5}, at::kLong)));
    const auto last = *loader.next();
    EXPECT_TRUE(at::equal(last.targets, at::tensor(targets, at::kLong))) << last.targets;
    EXPECT_TRUE((last.inputs >= 0).all().item<bool>());
  }
  const auto short_of_one = [](std::span<const int64_t> numbers) { return as_tensor(numbers.first(numbers.size() - 1)); };
  Loader loader{Sampler({.size = 3, .global_batch = 2, .order = Order::AsStored, .tail = Tail::Fill}),
                short_of_one,
                {.workers = GetParam(), .target_of_repeats = -100}};
  loader.next();
  EXPECT_THAT(message_of<UsageError>([&] { loader.next(); }), HasSubstr("batch 1 of epoch 0, counted from 0: "));
}

TEST_P(WithWorkers, FetchesWithoutGradients) {
  std::atomic<int> recording = 0;
  const auto fetch = [&](std::span<const int64_t> numbers) {
    if (c10::GradMode::is_enabled()) recording++;
    return as_tensor(numbers);
  };
  {
    Loader loader{Sampler(kSamples), fetch, {.workers = GetParam()}};
    loader.next();
  }
  EXPECT_EQ(recording, 0);
  EXPECT_TRUE(c10::GradMode::is_enabled());
}

/// Each sample's number, and what is drawn for it: the ranks' parts one after the other.
Samples augmented(std::span<const int64_t> numbers, std::span<const uint64_t> seeds) {
  if (numbers.front() % 3 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  auto samples = as_tensor(numbers);
  samples.targets = at::empty({samples.size()}, at::kDouble);
  for (int64_t i = 0; i < samples.size(); i++) {
    std::mt19937_64 source(seeds[static_cast<size_t>(i)]);
    samples.targets[i] = static_cast<double>(source() >> 11);
  }
  return samples;
}

/// The global batches of two epochs on so many ranks, from `start` on.
std::vector<at::Tensor> augmented_batches(int ranks, int workers, Position start = {}) {
  std::vector<std::unique_ptr<Loader>> loaders;
  for (int rank = 0; rank < ranks; rank++) {
    const SamplerOptions samples{.size = 43, .global_batch = 4, .local_ranks = {rank}, .ranks = ranks, .tail = Tail::Fill, .seed = 7};
    loaders.push_back(std::make_unique<Loader>(Sampler(samples), augmented, LoaderOptions{.workers = workers, .start = start}));
  }
  std::vector<at::Tensor> batches;
  while (loaders.front()->position().epoch < 2) {
    std::vector<at::Tensor> parts;
    for (auto& loader : loaders) {
      if (const auto part = loader->next()) parts.push_back(at::stack({part->inputs.to(at::kDouble), part->targets}));
    }
    if (!parts.empty()) batches.push_back(at::cat(parts, 1));
  }
  return batches;
}

void expect_same_batches(std::span<const at::Tensor> actual, std::span<const at::Tensor> expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); i++) EXPECT_TRUE(at::equal(actual[i], expected[i])) << i;
}

TEST_P(WithWorkers, AugmentsEachSampleInTheSameWay) {
  const auto expected = augmented_batches(1, 0);
  std::set<double> drawn;
  for (const auto& batch : expected) {
    for (int64_t i = 0; i < batch.size(1); i++) drawn.insert(batch[1][i].item<double>());
  }
  EXPECT_EQ(drawn.size(), 2U * 43);  // another draw for every sample and epoch; a repeated sample has the draw of its first time
  for (const int ranks : {1, 2, 4}) {
    expect_same_batches(augmented_batches(ranks, GetParam()), expected);
    expect_same_batches(augmented_batches(ranks, GetParam(), {.epoch = 0, .batch = 5}), std::span(expected).subspan(5));
  }
}

INSTANTIATE_TEST_SUITE_P(Workers, WithWorkers, ::testing::Values(0, 1, 2, 3));

TEST(Loader, FetchesAheadButNotFurtherThanAsked) {
  std::atomic<int> fetched = 0;
  const auto fetch = [&](std::span<const int64_t> numbers) {
    fetched++;
    fetched.notify_all();
    return as_tensor(numbers);
  };
  Loader loader{Sampler(kSamples), fetch, {.workers = 3, .ahead = 5}};
  for (int now = fetched; now < 5; now = fetched) fetched.wait(now);  // before next() asks for them
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(fetched, 5);
}

TEST(Loader, EndsWhileWorkersAreBusy) {
  std::atomic<int> busy = 0;
  for (int i = 0; i < 20; i++) {
    const auto fetch = [&](std::span<const int64_t> numbers) {
      busy++;
      std::this_thread::sleep_for(std::chrono::milliseconds(2));
      busy--;
      return as_tensor(numbers);
    };
    Loader loader{Sampler(kSamples), fetch, {.workers = 3}};
    for (int taken = 0; taken < i % 5; taken++) loader.next();
  }
  EXPECT_EQ(busy, 0);
}

TEST(Loader, InterruptsAPullThatWaitsWhenItGoes) {
  std::atomic<bool> is_pulled = false, is_over = false;
  const auto open = [&](int64_t) -> Pull {
    return [&]() -> std::optional<Samples> {
      is_pulled = true;
      is_pulled.notify_all();
      is_over.wait(false);  // as when reading from a socket to which nobody writes
      return std::nullopt;
    };
  };
  const auto interrupt = [&] {
    is_over = true;
    is_over.notify_all();
  };
  {
    Loader loader(Stream({.open = open, .interrupt = interrupt, .global_batch = 2}), {.workers = 2});
    is_pulled.wait(false);
  }
  EXPECT_TRUE(is_over);
}

TEST(Loader, FetchesInSeveralThreads) {
  std::mutex mutex;
  std::set<std::thread::id> threads;
  std::atomic<int> inside = 0;
  // Each of two fetches waits for the other, so one worker alone would never finish.
  const auto fetch = [&](std::span<const int64_t> numbers) {
    inside++;
    inside.notify_all();
    for (int now = inside; now < 2; now = inside) inside.wait(now);
    std::lock_guard lock(mutex);
    threads.insert(std::this_thread::get_id());
    return as_tensor(numbers);
  };
  Loader loader{Sampler(kSamples), fetch, {.workers = 2}};
  loader.next();
  loader.next();
  std::lock_guard lock(mutex);
  EXPECT_EQ(threads.size(), 2);
}

TEST(Loader, RefusesWhatCanNotWork) {
  const auto refusal = [](const Fetch& fetch, const LoaderOptions& options) {
    return message_of<UsageError>([&] { Loader(Sampler(kSamples), fetch, options); });
  };
  EXPECT_THAT(refusal({}, {}), HasSubstr("no function that fetches"));
  EXPECT_THAT(refusal(as_tensor, {.workers = -1}), HasSubstr("-1 workers"));
  EXPECT_THAT(refusal(as_tensor, {.ahead = 0}), HasSubstr("0 batches ahead"));
  EXPECT_THAT(refusal(as_tensor, {.start = {.epoch = 2, .batch = 11}}),
              HasSubstr("can't start at batch 11 of epoch 2, where an epoch has 10"));
}

}  // namespace
}  // namespace tessera::data::loader_test
