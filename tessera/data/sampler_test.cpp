#include "tessera/data/sampler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>
#include <set>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::data::sampler_test {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::message_of;
using Numbers = std::vector<int64_t>;

/// The global batches of an epoch: the parts of all ranks, in rank order.
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

/// Each sample of an epoch as often as it counts: the parts of all ranks without repeats, in rank order, and the sum of their weights.
struct Counted {
  std::vector<Numbers> batches;
  std::vector<double> weights;
};

Counted counted_epoch(SamplerOptions options, int64_t epoch = 0) {
  Counted all;
  for (int rank = 0; rank < options.ranks; rank++) {
    options.local_ranks = {rank};
    Sampler sampler(options);
    all.batches.resize(static_cast<size_t>(sampler.batches(epoch)));
    all.weights.resize(all.batches.size());
    for (size_t batch = 0; batch < all.batches.size(); batch++) {
      auto part = sampler.part({.epoch = epoch, .batch = static_cast<int64_t>(batch)});
      const auto& share = part.shares.at(0);
      EXPECT_EQ(part.repeats, share.repeats);
      EXPECT_EQ(part.seeds.size(), part.numbers.size());
      EXPECT_GT(part.numbers.size(), 0U);  // so that the rank goes through the model with the others
      part.numbers.resize(part.numbers.size() - static_cast<size_t>(part.repeats));
      EXPECT_EQ(part.numbers.empty(), share.weight == 0);
      all.batches[batch].insert(all.batches[batch].end(), part.numbers.begin(), part.numbers.end());
      all.weights[batch] += share.weight;
    }
  }
  for (const auto sum : all.weights) EXPECT_NEAR(sum, options.ranks, 1e-12);
  return all;
}

TEST(Sampler, KeepsTheTailAndGivesEachRankAboutAsMuchOfIt) {
  for (const int64_t size : {100, 99, 98, 97, 24, 5, 1}) {
    for (const int ranks : {1, 2, 3, 4}) {
      const auto seen = counted_epoch({.size = size, .global_batch = 12, .ranks = ranks, .order = Order::AsStored, .tail = Tail::Keep});
      EXPECT_EQ(all_of(seen.batches), first_numbers(size)) << size << " samples, " << ranks << " ranks";
    }
  }
  Sampler last({.size = 7, .global_batch = 4, .local_ranks = {0}, .ranks = 2, .order = Order::AsStored, .tail = Tail::Keep});
  EXPECT_THAT(last.part({.batch = 1}).numbers, ElementsAre(4, 5));
  EXPECT_DOUBLE_EQ(last.part({.batch = 1}).shares.at(0).weight, 4.0 / 3);  // the mean of two samples, of three on two ranks
  EXPECT_EQ(last.part({.batch = 0}).shares.at(0).weight, 1);
}

TEST(Sampler, TakesAnOrderOfTheProgram) {
  const auto every_second = [](int64_t epoch) {
    Numbers numbers;
    for (int64_t i = epoch % 2; i < 20; i += 2) numbers.insert(numbers.end(), {i, i});
    return numbers;
  };
  for (const int ranks : {1, 2, 4}) {
    SamplerOptions options{.size = 20, .global_batch = 4, .ranks = ranks, .sampler = every_second};
    EXPECT_EQ(all_of(epoch_of(options, 0)), every_second(0));
    EXPECT_EQ(all_of(epoch_of(options, 3)), every_second(1));
  }
  SamplerOptions options{.size = 20, .global_batch = 4, .sampler = every_second};
  const auto order = Sampler(options).order();
  EXPECT_THAT(order, HasSubstr("20 samples, in an order of the program's own ("));
  options.sampler = [](int64_t /*epoch*/) { return Numbers{3, 2, 1, 0}; };
  EXPECT_NE(Sampler(options).order(), order);
}

TEST(Sampler, TakesBatchesOfTheProgram) {
  const auto growing = [](int64_t epoch) {
    std::vector<Numbers> batches;
    int64_t next = 0;
    for (int64_t size = 1; size < 6 + epoch; size++) {
      auto& batch = batches.emplace_back();
      for (int64_t i = 0; i < size; i++) batch.push_back(next++);
    }
    return batches;
  };
  for (const int ranks : {1, 2, 3}) {
    for (const int64_t epoch : {0, 2})
      EXPECT_EQ(counted_epoch({.size = 100, .ranks = ranks, .batch_sampler = growing}, epoch).batches, growing(epoch));
  }
  Sampler sampler({.size = 100, .batch_sampler = growing});
  EXPECT_EQ(sampler.batches(), 5);
  EXPECT_EQ(sampler.batches(2), 7);
  EXPECT_EQ(sampler.part({.epoch = 0, .batch = 4}).numbers.size(), 5U);
  EXPECT_EQ(sampler.global_batch(), 0);
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
  EXPECT_THAT(refusal({.size = 9, .global_batch = 10}),
              HasSubstr("9 samples do not fill one global batch of 10; take a smaller one, or let it be filled (without --drop-last"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .local_ranks = {2}, .ranks = 2}), HasSubstr("no rank 2 of 2"));
  for (const auto& ranks : {std::vector<int>{}, {1, 0}, {1, 1}}) {
    EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .local_ranks = ranks, .ranks = 2}),
                HasSubstr("at least one rank, in ascending order"));
  }
  const auto numbers = [](Numbers all) { return [all](int64_t /*epoch*/) { return all; }; };
  const auto batches = [](std::vector<Numbers> all) { return [all](int64_t /*epoch*/) { return all; }; };
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .sampler = numbers({1, 9})}),
              HasSubstr("epoch 0 has sample 9, but the data set has 9"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .sampler = numbers({})}), HasSubstr("epoch 0 has no samples"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 4, .sampler = numbers({1, 2})}),
              HasSubstr("2 samples do not fill one global batch of 4"));
  EXPECT_THAT(refusal({.size = 9, .batch_sampler = batches({{1}, {}})}), HasSubstr("batch 1 of epoch 0 has no samples"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .batch_sampler = batches({{1}})}), HasSubstr("have their own sizes"));
  EXPECT_THAT(refusal({.size = 9, .sampler = numbers({1}), .batch_sampler = batches({{1}})}), HasSubstr("only one of them"));
  Sampler all_ranks({.size = 9, .local_ranks = {0, 1}, .ranks = 2, .batch_sampler = batches({{1, 2}, {3}})});
  EXPECT_THAT(message_of<UsageError>([&] { all_ranks.part({.batch = 1}); }), HasSubstr("1 samples can't be divided among 2 ranks"));
  EXPECT_THAT(refusal({.size = 9, .global_batch = 2, .local_ranks = {0, 1}, .ranks = 2, .tail = Tail::Keep}),
              HasSubstr("1 samples can't be divided among 2 ranks"));
  Sampler sampler({.size = 9, .global_batch = 2});
  EXPECT_THAT(message_of<UsageError>([&] { sampler.part({.epoch = 1, .batch = 4}); }), HasSubstr("no batch 4 in epoch 1; an epoch has 4"));
}

/// The samples of an epoch in batches whose size changes: two batches of each size, then batches of the last size to the end.
Numbers seen_in_batches_of(const std::vector<int64_t>& sizes, SamplerOptions options, int64_t epoch) {
  Numbers seen;
  for (const auto size : sizes) {
    options.global_batch = size;
    const auto first = std::ssize(seen);
    std::vector<Sampler> ranks;
    for (int rank = 0; rank < options.ranks; rank++) {
      options.local_ranks = {rank};
      ranks.emplace_back(options);
    }
    const auto all = ranks.front().batches(epoch, first), count = size == sizes.back() ? all : std::min<int64_t>(all, 2);
    for (int64_t batch = 0; batch < count; batch++) {
      for (auto& sampler : ranks) {
        const auto part = sampler.part({.epoch = epoch, .batch = batch, .first = first});
        const auto rows = std::ssize(part.numbers) - std::accumulate(part.shares.begin(), part.shares.end(), int64_t{0},
                                                                     [](int64_t sum, const Share& share) { return sum + share.repeats; });
        seen.insert(seen.end(), part.numbers.begin(), part.numbers.begin() + rows);
      }
    }
  }
  return seen;
}

TEST(Sampler, GoesOnBehindAnySampleInBatchesOfAnotherSize) {
  for (const auto order : {Order::Shuffled, Order::AsStored}) {
    for (const auto tail : {Tail::Keep, Tail::Fill}) {
      const SamplerOptions options{.size = 101, .global_batch = 6, .order = order, .tail = tail, .seed = 3};
      const auto whole = seen_in_batches_of({1}, options, 2);
      EXPECT_EQ(std::set<int64_t>(whole.begin(), whole.end()).size(), 101);
      for (const auto& sizes : std::vector<std::vector<int64_t>>{{6, 9}, {6, 15, 3}, {9, 21, 12}, {45, 3, 6}, {48, 51, 3}}) {
        for (const int ranks : {1, 3}) {
          auto of_ranks = options;
          of_ranks.ranks = ranks;
          EXPECT_EQ(seen_in_batches_of(sizes, of_ranks, 2), whole) << ranks << " ranks, batches of " << sizes.front() << ", " << sizes[1];
        }
      }
    }
  }
  Sampler dropping({.size = 20, .global_batch = 6});
  EXPECT_EQ(dropping.batches(0, 4), 2);
  EXPECT_EQ(dropping.batches(0, 20), 0);
  EXPECT_THAT(message_of<UsageError>([&] { dropping.batches(0, 21); }), HasSubstr("epoch 0 has 20 samples, so no batch begins after 21"));
  Sampler filling({.size = 5, .global_batch = 4, .order = Order::AsStored, .tail = Tail::Fill});
  EXPECT_THAT(filling.part({.batch = 0, .first = 3}).numbers, ElementsAre(3, 4, 0, 1));
  const auto own = [](int64_t) { return std::vector<std::vector<int64_t>>{{0}, {1, 2}}; };
  EXPECT_THAT(message_of<UsageError>([&] { Sampler({.size = 3, .batch_sampler = own}).batches(0, 1); }),
              HasSubstr("a batch_sampler decides where batches begin"));
  EXPECT_THAT(message_of<UsageError>([&] {
                Sampler({.size = 12, .global_batch = 4, .local_ranks = {0, 1}, .ranks = 2, .tail = Tail::Keep}).batches(0, 3);
              }),
              HasSubstr("can't be divided among 2 ranks"));
}

}  // namespace
}  // namespace tessera::data::sampler_test
