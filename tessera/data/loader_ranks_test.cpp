// Loaders whose ranks take each batch together: rank 0 dispatches, or ranks with sources of different lengths are joined.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/data/loader.h"
#include "tests/testing/net.h"
#include "tests/testing/transports.h"

namespace tessera::data::loader_ranks_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;

Samples rows_of(std::span<const int64_t> numbers) {
  const auto rows = at::tensor(numbers, at::kLong);
  return {.inputs = rows.unsqueeze(1).to(at::kHalf).expand({-1, 3}), .targets = rows > 3};
}

void expect_same(const std::optional<Samples>& actual, const std::optional<Samples>& expected) {
  ASSERT_EQ(actual.has_value(), expected.has_value());
  if (!expected) return;
  EXPECT_TRUE(at::equal(actual->inputs, expected->inputs));
  EXPECT_TRUE(at::equal(actual->targets, expected->targets));
  EXPECT_EQ(actual->inputs.scalar_type(), expected->inputs.scalar_type());
  EXPECT_EQ(actual->repeats, expected->repeats);
  EXPECT_EQ(actual->weight, expected->weight);
}

TEST(LoaderOfRanks, DispatchesWhatEachRankWouldFetch) {
  for (const auto tail : {Tail::Drop, Tail::Fill, Tail::Keep}) {
    for (const int workers : {0, 2}) {
      testing::with_ranks(3, [&](const Communicator& world) {
        const SamplerOptions samples{
            .size = 31, .global_batch = 6, .local_ranks = world.local_ranks(), .ranks = world.size(), .tail = tail, .seed = 3};
        const auto fetch = [&](std::span<const int64_t> numbers) {
          EXPECT_TRUE(world.is_first());
          return rows_of(numbers);
        };
        Loader own{Sampler(samples), rows_of};
        Loader dispatched{Sampler(samples), fetch, {.workers = workers, .dispatch = world}};
        EXPECT_EQ(dispatched.batches(), own.batches());
        for (int i = 0; i < 2 * (*own.batches() + 1); i++) {
          expect_same(dispatched.next(), own.next());
          EXPECT_EQ(dispatched.at_end(), own.at_end());
        }
        EXPECT_EQ(dispatched.position(), own.position());
        dispatched.seek({.epoch = 1, .batch = 2});
        own.seek({.epoch = 1, .batch = 2});
        expect_same(dispatched.next(), own.next());
      });
    }
  }
}

TEST(LoaderOfRanks, TellsAllRanksWhatRank0CouldNotFetch) {
  testing::with_ranks(2, [](const Communicator& world) {
    const SamplerOptions samples{.size = 8, .global_batch = 2, .ranks = 2, .order = Order::AsStored};
    const auto fetch = [](std::span<const int64_t> numbers) {
      if (numbers.front() == 2) throw IoError("the disk is gone");
      return numbers.front() == 0 ? rows_of(numbers) : Samples{.inputs = at::ones({5}), .targets = {}};
    };
    Loader loader{Sampler(samples), fetch, {.dispatch = world}};
    EXPECT_TRUE(loader.next());
    for (int i = 0; i < 2; i++)
      EXPECT_THAT(message_of<IoError>([&] { loader.next(); }), HasSubstr("batch 1 of epoch 0, counted from 0: the disk is gone"));
    loader.seek({.batch = 2});
    EXPECT_THAT(message_of<UsageError>([&] { loader.next(); }),
                HasSubstr("a row for each of its 2 samples, but there is a tensor of sizes [5]"));
  });
}

StreamOptions counting(int64_t size) {
  const auto open = [size](int64_t /*epoch*/) {
    return [size, next = int64_t{0}]() mutable -> std::optional<Samples> {
      if (next == size) return std::nullopt;
      return Samples{.inputs = at::full({1}, next++, at::kLong), .targets = {}};
    };
  };
  return {.open = open, .global_batch = 2, .tail = Tail::Keep};
}

TEST(LoaderOfRanks, JoinsRanksThatRunOutFirst) {
  for (const int workers : {0, 2}) {
    testing::with_ranks(3, [&](const Communicator& world) {
      const int64_t own = std::array<int64_t, 3>{2, 7, 3}[static_cast<size_t>(world.rank())];
      Loader loader(Stream(counting(own)), {.workers = workers, .join = world});
      EXPECT_EQ(loader.global_batch(), 6);
      for (int epoch = 0; epoch < 2; epoch++) {
        int64_t samples = 0, batches = 0;
        while (const auto batch = loader.next()) {
          const std::array<int64_t, 4> rows_of_all = {6, 3, 2, 1};  // 2+2+2, 0+2+1, 0+2+0, 0+1+0
          const auto fresh = batch->size() - batch->repeats;
          EXPECT_DOUBLE_EQ(batch->weight,
                           static_cast<double>(3 * fresh) / static_cast<double>(rows_of_all.at(static_cast<size_t>(batches))));
          samples += fresh;
          batches++;
          EXPECT_EQ(loader.at_end(), batches == 4);
        }
        EXPECT_EQ(samples, own);
        EXPECT_EQ(batches, 4);
      }
      loader.seek({.epoch = 2, .batch = 3});  // where two of three have run out
      const auto last = loader.next();
      EXPECT_EQ(last->weight, world.rank() == 1 ? 3 : 0);
      EXPECT_FALSE(loader.next());
      Loader fresh(Stream(counting(own)), {.workers = workers, .start = {.batch = 2}, .join = world});
      EXPECT_EQ(fresh.next()->weight, world.rank() == 1 ? 3 : 0);
    });
  }
}

TEST(LoaderOfRanks, GivesAJoinedRankUnchangedSamples) {
  testing::with_ranks(2, [](const Communicator& world) {
    Loader loader(Stream(counting(2 + 8 * world.rank())), {.join = world});
    while (const auto batch = loader.next()) {
      EXPECT_LT(batch->inputs.max().item<int64_t>(), 10);
      batch->inputs.add_(100);  // as programs do that normalise in place
    }
  });
}

/// A source of a given number of batches, each of one number.
class CountingSource : public Source {
 public:
  CountingSource(int64_t count, std::vector<Share> shares) : count_(count), shares_(std::move(shares)) {}
  Drawn draw(const Position& position) override {
    if (position.batch >= count_) return {};
    return {.make = [position] { return Samples{.inputs = at::full({1}, position.batch), .targets = {}}; }, .shares = shares_};
  }
  std::optional<int64_t> batches(int64_t /*epoch*/) override { return std::nullopt; }
  int64_t global_batch() const override { return 1; }
  std::string order() const override { return "numbers"; }
  int ranks() const override { return 1; }
  void take_all_ranks() override {}

 private:
  const int64_t count_;
  const std::vector<Share> shares_;
};

TEST(LoaderOfRanks, TakesASourceOfTheProgram) {
  Loader loader(std::make_unique<CountingSource>(3, std::vector{Share{.rows = 1}}));
  for (int epoch = 0; epoch < 2; epoch++) {
    int64_t batches = 0;
    while (loader.next()) batches++;
    EXPECT_EQ(batches, 3);
  }
  EXPECT_THAT(message_of<UsageError>([&] { loader.seek({.first = 2}); }), HasSubstr("this source can't resume after samples"));
  Loader wrong(std::make_unique<CountingSource>(3, std::vector<Share>()));
  EXPECT_THAT(message_of<UsageError>([&] { wrong.next(); }), HasSubstr("a batch without shares"));
}

TEST(LoaderOfRanks, KnowsForHowManyRanksASourceIs) {
  testing::with_ranks(2, [](const Communicator& world) {
    EXPECT_THAT(message_of<UsageError>([&] { Loader(Stream(counting(4)), {.dispatch = world}); }),
                HasSubstr("dispatch needs a source of all ranks of the group, but this one divides batches among 1"));
    auto of_both = counting(4);
    of_both.ranks = 2;
    of_both.local_ranks = {world.rank()};
    EXPECT_THAT(message_of<UsageError>([&] { Loader(Stream(of_both), {.join = world}); }),
                HasSubstr("but this one divides batches among 2"));
  });
}

TEST(LoaderOfRanks, RefusesARankWithoutAnySample) {
  testing::with_ranks(2, [](const Communicator& world) {
    Loader loader(Stream(counting(4 * world.rank())), {.join = world});
    EXPECT_THAT(message_of<UsageError>([&] { loader.next(); }), HasSubstr("but this rank's has none"));
    EXPECT_THAT(message_of<UsageError>([&] { Loader(Stream(counting(4)), {.dispatch = world, .join = world}); }), HasSubstr("choose one"));
  });
}

}  // namespace
}  // namespace tessera::data::loader_ranks_test
