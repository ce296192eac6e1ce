#include "tessera/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tessera/testing/transports.h"

namespace tessera::data::sampler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Numbers = std::vector<int64_t>;

/// What all ranks together see of an epoch: its global batches, in rank order.
std::vector<Numbers> epoch_of(SamplerOptions options, int64_t epoch) {
  std::vector<Numbers> batches;
  for (int rank = 0; rank < options.ranks; rank++) {
    options.local_ranks = {rank};
    Sampler sampler(options);
    batches.resize(static_cast<size_t>(sampler.batches()));
    for (size_t batch = 0; batch < batches.size(); batch++) {
      const auto part = sampler.part({.epoch = epoch, .batch = static_cast<int64_t>(batch)});
      EXPECT_EQ(part.numbers.size(), static_cast<size_t>(options.global_batch / options.ranks));
      batches[batch].insert(batches[batch].end(), part.numbers.begin(), part.numbers.end());
    }
  }
  return batches;
}

Numbers all_of(const std::vector<Numbers>& batches) {
  Numbers all;
  for (const auto& batch : batches) all.insert(all.end(), batch.begin(), batch.end());
  return all;
}

Numbers first_numbers(int64_t count) {
  Numbers all(static_cast<size_t>(count));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

TEST(Sampler, GivesAnyNumberOfRanksTheSameGlobalBatches) {
  for (const auto order : {Order::Shuffled, Order::AsStored}) {
    for (const auto tail : {Tail::Drop, Tail::Fill}) {
      for (const int64_t size : {12, 100, 120, 1001}) {
        SamplerOptions options{.size = size, .global_batch = 12, .order = order, .tail = tail, .seed = 5};
        const auto alone = epoch_of(options, 3);
        for (const int ranks : {2, 3, 4, 6, 12}) {
          options.ranks = ranks;
          EXPECT_EQ(epoch_of(options, 3), alone) << size << " samples, " << ranks << " ranks";
        }
      }
    }
  }
}

TEST(Sampler, VisitsEverySampleOnceAnEpoch) {
  auto seen = all_of(epoch_of({.size = 120, .global_batch = 12, .ranks = 3}, 0));
  std::ranges::sort(seen);
  EXPECT_EQ(seen, first_numbers(120));
}

TEST(Sampler, DropsTheTail) {
  const auto seen = all_of(epoch_of({.size = 100, .global_batch = 12, .ranks = 3}, 0));
  EXPECT_EQ(seen.size(), 96);
  EXPECT_EQ(std::set<int64_t>(seen.begin(), seen.end()).size(), 96);
}

TEST(Sampler, FillsTheTailAndSaysWhatIsRepeated) {
  for (const int64_t size : {100, 5}) {  // 5: less than half a batch
    SamplerOptions options{.size = size, .global_batch = 12, .ranks = 3, .tail = Tail::Fill};
    const auto seen = all_of(epoch_of(options, 0));
    auto fresh = Numbers(seen.begin(), seen.begin() + size);
    std::ranges::sort(fresh);
    EXPECT_EQ(fresh, first_numbers(size));
    for (size_t i = static_cast<size_t>(size); i < seen.size(); i++) EXPECT_EQ(seen[i], seen[i - static_cast<size_t>(size)]);

    int64_t counted = 0;
    for (int rank = 0; rank < options.ranks; rank++) {
      options.local_ranks = {rank};
      Sampler sampler(options);
      for (int64_t batch = 0; batch < sampler.batches(); batch++) counted += 4 - sampler.part({.batch = batch}).repeats;
    }
    EXPECT_EQ(counted, size);
  }
}

TEST(Sampler, ShufflesAnewInEveryEpochAndForEverySeed) {
  const auto order = [](uint64_t seed, int64_t epoch) { return all_of(epoch_of({.size = 120, .global_batch = 12, .seed = seed}, epoch)); };
  std::set<Numbers> orders;
  for (const uint64_t seed : {uint64_t{0}, uint64_t{1}, uint64_t{1} << 40}) {
    for (const int64_t epoch : {0, 1, 2}) orders.insert(order(seed, epoch));
  }
  EXPECT_EQ(orders.size(), 9);
  EXPECT_FALSE(orders.contains(first_numbers(120)));
  EXPECT_EQ(order(1, 2), order(1, 2));
  EXPECT_EQ(all_of(epoch_of({.size = 120, .global_batch = 12, .order = Order::AsStored}, 7)), first_numbers(120));
}

// A run that is continued on another machine must meet the same order.
TEST(Sampler, ShufflesAlikeOnEveryMachine) {
  EXPECT_THAT(all_of(epoch_of({.size = 10, .global_batch = 10, .seed = 1}, 1)), ElementsAre(4, 6, 2, 3, 7, 9, 0, 8, 5, 1));
}

// Every sample comes to every place about equally often: 5000 draws of 10 places, 500 each, 6 standard deviations are 127.
TEST(Sampler, ShufflesFairly) {
  std::vector<Numbers> count(10, Numbers(10));
  Sampler sampler({.size = 10, .global_batch = 10});
  for (int64_t epoch = 0; epoch < 5000; epoch++) {
    const auto numbers = sampler.part({.epoch = epoch}).numbers;
    for (size_t place = 0; place < 10; place++) count[place][static_cast<size_t>(numbers[place])]++;
  }
  for (const auto& place : count) EXPECT_THAT(place, ::testing::Each(::testing::AllOf(::testing::Gt(373), ::testing::Lt(627))));
}

TEST(Sampler, GivesAProcessThePartsOfAllItsRanks) {
  SamplerOptions options{.size = 10, .global_batch = 8, .ranks = 4, .order = Order::AsStored, .tail = Tail::Fill};
  options.local_ranks = {1, 3};
  Sampler sampler(options);
  EXPECT_THAT(sampler.part({.batch = 0}).numbers, ElementsAre(2, 3, 6, 7));
  const auto last = sampler.part({.batch = 1});
  EXPECT_THAT(last.numbers, ElementsAre(0, 1, 4, 5));
  EXPECT_EQ(last.repeats, 4);
}

TEST(Sampler, GoesBackAndForth) {
  Sampler sampler({.size = 100, .global_batch = 10});
  const auto early = sampler.part({.epoch = 0, .batch = 3}).numbers;
  sampler.part({.epoch = 4, .batch = 9});
  EXPECT_EQ(sampler.part({.epoch = 0, .batch = 3}).numbers, early);
}

TEST(Sampler, RefusesWhatCanNotWork) {
  const auto refusal = [](const SamplerOptions& options) { return message_of<UsageError>([&] { Sampler sampler(options); }); };
  EXPECT_THAT(refusal({.size = 100, .global_batch = 10, .ranks = 3}), HasSubstr("global batch of 10 can't be divided among 3 ranks"));
  EXPECT_THAT(refusal({.size = 100}), HasSubstr("global batch of 0"));
  EXPECT_THAT(refusal({.size = 0, .global_batch = 10}), HasSubstr("empty"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 10}), HasSubstr("9 samples do not fill one global batch of 10"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .local_ranks = {2}, .ranks = 2}), HasSubstr("no rank 2 of 2"));
  for (const auto& ranks : {std::vector<int>{}, {1, 0}, {1, 1}}) {
    EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .local_ranks = ranks, .ranks = 2}),
                HasSubstr("at least one rank, in ascending order"));
  }
  Sampler sampler({.size = 9, .global_batch = 2});
  EXPECT_THAT(message_of<UsageError>([&] { sampler.part({.epoch = 1, .batch = 4}); }), HasSubstr("no batch 4 in epoch 1; an epoch has 4"));
}

}  // namespace
}  // namespace tessera::data::sampler_test
