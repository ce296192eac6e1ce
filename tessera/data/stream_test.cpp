#include "tessera/data/stream.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/data/loader.h"
#include "tests/testing/transports.h"

namespace tessera::data::stream_test {
namespace {

using ::testing::HasSubstr;
using testing::message_of;
using Numbers = std::vector<int64_t>;

/// Numbers from 1000 * epoch on, in chunks of so many.
StreamOptions counting(int64_t size, int64_t chunk, int64_t global_batch) {
  const auto open = [=](int64_t epoch) {
    return [=, next = int64_t{0}]() mutable -> std::optional<Samples> {
      if (next == size) return std::nullopt;
      const auto end = std::min(next + chunk, size);
      const auto rows = at::arange(next, end, at::kLong) + 1000 * epoch;
      next = end;
      return Samples{.inputs = rows, .targets = 2 * rows};
    };
  };
  return {.open = open, .global_batch = global_batch};
}

Numbers numbers_in(const Samples& samples) {
  const auto* const start = samples.inputs.const_data_ptr<int64_t>();
  return {start, start + samples.size()};
}

struct Batch {
  Numbers numbers;
  int64_t repeats = 0;
  double weight = 1;
  bool operator==(const Batch&) const = default;
};

std::vector<Batch> epoch_of(Loader& loader) {
  std::vector<Batch> batches;
  while (const auto batch = loader.next()) {
    EXPECT_TRUE(at::equal(batch->targets, 2 * batch->inputs));
    batches.push_back({numbers_in(*batch), batch->repeats, batch->weight});
  }
  return batches;
}

TEST(Stream, HasTheBatchesOfASamplerThatShufflesNothing) {
  for (const auto tail : {Tail::Drop, Tail::Fill, Tail::Keep}) {
    for (const int ranks : {1, 2, 4}) {
      for (int rank = 0; rank < ranks; rank++) {
        for (const int64_t size : {40, 43, 31, 5}) {
          if (size == 5 && tail == Tail::Drop) continue;
          const SamplerOptions samples{
              .size = size, .global_batch = 8, .local_ranks = {rank}, .ranks = ranks, .order = Order::AsStored, .tail = tail};
          const auto fetch = [](std::span<const int64_t> numbers) {
            const auto rows = at::tensor(numbers, at::kLong);
            return Samples{.inputs = rows, .targets = 2 * rows};
          };
          Loader sampled{Sampler(samples), fetch};
          const auto expected = epoch_of(sampled);
          for (const int64_t chunk : {1, 3, 8, 100}) {
            for (const int workers : {0, 2}) {
              auto options = counting(size, chunk, 8);
              options.local_ranks = {rank};
              options.ranks = ranks;
              options.tail = tail;
              Loader loader(Stream(options), {.workers = workers});
              EXPECT_EQ(epoch_of(loader), expected) << size << " samples in chunks of " << chunk << ", rank " << rank << " of " << ranks;
              EXPECT_EQ(loader.position(), Position{.epoch = 1});
              EXPECT_EQ(epoch_of(loader).front().numbers.front(), expected.front().numbers.front() + 1000);
            }
          }
        }
      }
    }
  }
}

TEST(Stream, GoesOnWhereAnotherLeftOff) {
  for (const int workers : {0, 2}) {
    auto options = counting(43, 5, 8);
    options.tail = Tail::Fill;
    Loader whole(Stream(options), {.workers = workers});
    const auto expected = epoch_of(whole);
    for (const int64_t taken : {0, 2, 5, 6}) {
      Loader first(Stream(options), {.workers = workers});
      for (int64_t i = 0; i < taken; i++) first.next();
      Loader second(Stream(options), {.workers = workers, .start = first.position()});
      EXPECT_EQ(epoch_of(second), std::vector<Batch>(expected.begin() + taken, expected.end())) << taken;
      second.seek({.epoch = 0, .batch = 1});
      EXPECT_EQ(epoch_of(second), std::vector<Batch>(expected.begin() + 1, expected.end()));
    }
  }
}

TEST(Stream, GoesOnInBatchesOfAnotherSize) {
  const auto expected = [] {
    Loader whole(Stream(counting(43, 5, 43)), {.workers = 0});
    return epoch_of(whole).front().numbers;
  }();
  for (const auto tail : {Tail::Fill, Tail::Keep}) {
    for (const int workers : {0, 2}) {
      auto options = counting(43, 5, 8);
      options.tail = tail;
      Loader first(Stream(options), {.workers = workers});
      Numbers seen;
      for (int i = 0; i < 2; i++) {
        const auto numbers = numbers_in(*first.next());
        seen.insert(seen.end(), numbers.begin(), numbers.end());
      }
      options.global_batch = 6;
      Loader second(Stream(options), {.workers = workers});
      second.seek(second.place_of(first.position(), 8));
      EXPECT_EQ(second.position(), (Position{.first = 16}));
      for (const auto& batch : epoch_of(second)) {
        seen.insert(seen.end(), batch.numbers.begin(), batch.numbers.end() - batch.repeats);
        EXPECT_EQ(Numbers(batch.numbers.end() - batch.repeats, batch.numbers.end()),
                  Numbers(expected.begin(), expected.begin() + batch.repeats));
      }
      EXPECT_EQ(seen, expected);
      EXPECT_EQ(epoch_of(second).size(), 8);
      second.seek({.first = 44});
      EXPECT_THAT(message_of<UsageError>([&] { second.next(); }), HasSubstr("epoch 0 ends after 43 samples, so no batch begins after 44"));
    }
  }
}

TEST(Stream, SaysWithTheLastBatchThatItIsTheLast) {
  for (const int workers : {0, 2}) {
    Loader loader(Stream(counting(24, 5, 8)), {.workers = workers});
    EXPECT_FALSE(loader.batches());
    EXPECT_FALSE(loader.at_end());
    for (const bool ends : {false, false, true}) {
      EXPECT_TRUE(loader.next());
      EXPECT_EQ(loader.at_end(), ends);
    }
    EXPECT_EQ(loader.batches(), 3);
    EXPECT_FALSE(loader.next());
    EXPECT_FALSE(loader.at_end());
  }
}

TEST(Stream, TransformsTheOwnPartBySeedsOfTheSamples) {
  std::vector<at::Tensor> by_ranks;
  for (const int ranks : {1, 2}) {
    std::vector<at::Tensor> all(static_cast<size_t>(ranks));
    for (int rank = 0; rank < ranks; rank++) {
      auto options = counting(16, 3, 4);
      options.local_ranks = {rank};
      options.ranks = ranks;
      options.seed = 7;
      options.transform = [ranks](Samples samples, std::span<const uint64_t> seeds) {
        EXPECT_EQ(samples.size(), 4 / ranks);
        std::vector<int64_t> low;
        for (const auto seed : seeds) low.push_back(static_cast<int64_t>(seed >> 1));
        samples.inputs = at::tensor(low, at::kLong);
        return samples;
      };
      Loader loader{Stream(options)};
      std::vector<at::Tensor> parts;
      for (const auto& batch : loader) parts.push_back(batch.inputs);
      all[static_cast<size_t>(rank)] = at::stack(parts);
    }
    by_ranks.push_back(at::cat(all, 1));
  }
  EXPECT_TRUE(at::equal(by_ranks[0], by_ranks[1]));
  EXPECT_EQ(std::get<0>(at::_unique(by_ranks[0])).numel(), 16);
}

TEST(Stream, ThrowsWhatPullThrowsAtTheBatchThatItBelongsTo) {
  for (const int workers : {0, 2}) {
    auto options = counting(24, 4, 4);
    options.open = [open = options.open](int64_t epoch) {
      return [pull = open(epoch), pulled = 0]() mutable -> std::optional<Samples> {
        if (pulled++ == 3) throw IoError("the line is cut");
        return pull();
      };
    };
    Loader loader(Stream(options), {.workers = workers});
    for (int i = 0; i < 3; i++) EXPECT_TRUE(loader.next());
    for (int i = 0; i < 2; i++)
      EXPECT_EQ(message_of<IoError>([&] { loader.next(); }), "batch 3 of epoch 0, counted from 0: the line is cut");
    EXPECT_EQ(loader.position(), (Position{.batch = 3}));
  }
}

TEST(Stream, IsOpenedOnceForAnEpoch) {
  for (const int workers : {0, 2}) {
    auto options = counting(24, 4, 4);
    std::atomic<int> opened = 0, pulled = 0;
    options.open = [&, open = options.open](int64_t epoch) {
      opened++;
      return [&, pull = open(epoch)]() mutable {
        pulled++;
        return pull();
      };
    };
    Loader loader(Stream(options), {.workers = workers, .ahead = 2});
    if (workers > 0) {
      while (pulled < 2) std::this_thread::yield();
    }
    loader.place([](const at::Tensor& rows) { return rows + 1; });
    loader.seek({});
    EXPECT_EQ(loader.next()->inputs[0].item<int64_t>(), 1);
    EXPECT_EQ(opened, 1);
    EXPECT_FALSE(loader.at_end());
  }
}

TEST(Stream, DrawsNothingMoreAfterAnError) {
  std::atomic<int> opened = 0;
  StreamOptions options{.open = [&](int64_t /*epoch*/) -> Pull {
                          opened++;
                          return []() -> std::optional<Samples> { throw IoError("the line is cut"); };
                        },
                        .global_batch = 2};
  Loader loader(Stream(options), {.workers = 2});
  EXPECT_THROW(loader.next(), IoError);
  EXPECT_EQ(opened, 1);
  loader.seek({});
  EXPECT_THROW(loader.next(), IoError);
  EXPECT_EQ(opened, 2);
}

TEST(Stream, RefusesWhatCanNotWork) {
  const auto refusal = [](StreamOptions options, const Position& start = {}) {
    return message_of<UsageError>([&] {
      Loader loader(Stream(std::move(options)), {.workers = 0, .start = start});
      loader.next();
    });
  };
  EXPECT_THAT(refusal({.global_batch = 4}), HasSubstr("no function that opens"));
  EXPECT_THAT(refusal(counting(8, 1, 0)), HasSubstr("a global batch of 0"));
  EXPECT_THAT(refusal({.open = [](int64_t) { return Pull(); }, .global_batch = 4}), HasSubstr("returned no function that pulls"));
  EXPECT_THAT(refusal(counting(3, 1, 4)), HasSubstr("3 samples do not fill one global batch of 4"));
  EXPECT_THAT(refusal(counting(0, 1, 4)), HasSubstr("epoch 0 has no batches"));
  EXPECT_THAT(refusal(counting(8, 1, 4), {.batch = 3}), HasSubstr("can't start at batch 3 of epoch 0, where an epoch has 2"));
  const auto gives = [](Samples samples) {
    return StreamOptions{.open = [samples](int64_t) { return [samples]() { return std::optional(samples); }; }, .global_batch = 4};
  };
  EXPECT_THAT(refusal(gives({})), HasSubstr("samples without a row"));
  EXPECT_THAT(refusal(gives({.inputs = at::ones({2, 3}), .targets = at::ones({3})})),
              HasSubstr("2 rows of inputs, but targets of sizes [3]"));
}

}  // namespace
}  // namespace tessera::data::stream_test
