// Where parameters lie in buffers and chunks.
#include "tessera/shard/unit/layout.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>

namespace tessera::layout_test {
namespace {

using ::testing::ElementsAre;

/// Which values of each parameter a rank has, as "begin+numel".
std::vector<std::string> parts(const BufferLayout& layout) {
  std::vector<std::string> result;
  for (const auto& span : layout.spans) result.push_back(std::to_string(span.shard_begin) + "+" + std::to_string(span.shard_numel));
  return result;
}

using Make = std::function<BufferLayout(RankPlace)>;

/// Every value of every parameter is on one rank, at the place in its chunk that it has in the buffer.
void expect_complete(const Make& make, int ranks) {
  const auto first = make({.rank = 0, .ranks = ranks});
  for (size_t i = 0; i < first.spans.size(); i++) {
    int64_t next = 0;
    for (int rank = 0; rank < ranks; rank++) {
      const auto layout = make({.rank = rank, .ranks = ranks});
      const auto& span = layout.spans[i];
      EXPECT_EQ(layout.chunk, first.chunk);
      EXPECT_EQ(span.offset, first.spans[i].offset);
      if (span.shard_numel == 0) continue;
      EXPECT_EQ(span.shard_begin, next);
      EXPECT_EQ(rank * layout.chunk + span.shard_offset, span.offset + span.shard_begin);
      next += span.shard_numel;
    }
    EXPECT_EQ(next, first.spans[i].numel);
  }
}

const std::vector<int64_t> kNumels = {35, 5, 1, 0, 64, 7};

TEST(Layout, KeepsEveryValueOnce) {
  for (const int ranks : {1, 2, 3, 4, 7}) {
    expect_complete([](RankPlace place) { return flat_layout(kNumels, 16, place); }, ranks);
    expect_complete([](RankPlace place) { return whole_parameter_layout(kNumels, 16, place); }, ranks);
    expect_complete([](RankPlace place) { return row_layout(35, 5, place); }, ranks);
    expect_complete([](RankPlace place) { return row_layout(5, 1, place); }, ranks);
    expect_complete([](RankPlace place) { return row_layout(0, 0, place); }, ranks);
  }
}

TEST(Layout, OfFlatBuffersCutsAnywhere) {
  EXPECT_THAT(parts(flat_layout(kNumels, 1, {.rank = 0, .ranks = 2})), ElementsAre("0+35", "0+5", "0+1", "0+0", "0+15", "0+0"));
  EXPECT_THAT(parts(flat_layout(kNumels, 1, {.rank = 1, .ranks = 2})), ElementsAre("0+0", "0+0", "0+0", "0+0", "15+49", "0+7"));
}

TEST(Layout, OfFlatBuffersHasChunksOfAMultiple) {
  const auto chunk = [](int64_t multiple) { return flat_layout(kNumels, 16, {.rank = 0, .ranks = 3}, multiple).chunk; };
  EXPECT_EQ(chunk(1), 64);  // 151 values and 32 of padding between them
  EXPECT_EQ(chunk(128), 128);
  EXPECT_EQ(chunk(24), 96);  // the next multiple of both 16 and 24
  for (const int ranks : {1, 2, 3, 7}) expect_complete([](RankPlace place) { return flat_layout(kNumels, 16, place, 100); }, ranks);
}

TEST(Layout, OfRowsCutsBetweenThemAndLeavesTheLastRanksLess) {
  // As torch.chunk does: of seven rows on three ranks 3, 3 and 1, on four ranks 2, 2, 2 and 1, on five ranks 2, 2, 2, 1 and none.
  EXPECT_THAT(parts(row_layout(35, 5, {.rank = 2, .ranks = 3})), ElementsAre("30+5"));
  EXPECT_THAT(parts(row_layout(35, 5, {.rank = 3, .ranks = 4})), ElementsAre("30+5"));
  EXPECT_THAT(parts(row_layout(35, 5, {.rank = 4, .ranks = 5})), ElementsAre("0+0"));
}

TEST(Layout, OfWholeParametersCutsNoneAndIsBalanced) {
  const std::vector<int64_t> numels = {10, 20, 30, 40, 5};
  EXPECT_THAT(parts(whole_parameter_layout(numels, 1, {.rank = 0, .ranks = 2})), ElementsAre("0+10", "0+20", "0+30", "0+0", "0+0"));
  EXPECT_THAT(parts(whole_parameter_layout(numels, 1, {.rank = 1, .ranks = 2})), ElementsAre("0+0", "0+0", "0+0", "0+40", "0+5"));
  EXPECT_EQ(whole_parameter_layout(numels, 1, {.rank = 0, .ranks = 2}).chunk, 60);
  // More ranks than parameters: the last ones have none.
  EXPECT_THAT(parts(whole_parameter_layout(std::vector<int64_t>{3}, 1, {.rank = 1, .ranks = 2})), ElementsAre("0+0"));
}

}  // namespace
}  // namespace tessera::layout_test
