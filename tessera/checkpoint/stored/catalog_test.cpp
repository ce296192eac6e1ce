// Boxes of tensors are read from the files that a catalog names.
#include "tessera/checkpoint/stored/catalog.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fstream>
#include <random>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::catalog_test {
namespace {

using checkpoint::Catalog;
using checkpoint::CatalogReader;
using checkpoint::StoredBox;
using ::testing::HasSubstr;

/// Writes a tensor box by box, in any memory order and with gaps, and makes a catalog of it.
class Scattered {
 public:
  explicit Scattered(const std::filesystem::path& path) : path_(path), file_(path, std::ios::binary) { file_ << "head"; }

  void add(const at::Tensor& whole, const TensorSlice& box, at::IntArrayRef order) {
    const auto back = [&] {
      std::vector<int64_t> result(order.size());
      for (size_t i = 0; i < order.size(); i++) result[static_cast<size_t>(order[i])] = static_cast<int64_t>(i);
      return result;
    }();
    const auto values = view_of(whole, box).permute(order).contiguous().cpu();
    boxes.push_back(
        {.box = box, .file = 0, .offset = static_cast<uint64_t>(file_.tellp()), .strides = values.permute(back).strides().vec()});
    file_.write(static_cast<const char*>(values.const_data_ptr()), static_cast<std::streamsize>(values.nbytes()));
    file_ << "gap";
  }
  Catalog catalog(const at::Tensor& whole) {
    file_.close();
    return {.files = {path_}, .tensors = {{"w", {.dtype = whole.scalar_type(), .shape = whole.sizes().vec(), .boxes = boxes}}}};
  }

  std::vector<StoredBox> boxes;

 private:
  std::filesystem::path path_;
  std::ofstream file_;
};

TensorSlice rows(const at::Tensor& whole, int64_t begin, int64_t count) {
  auto slice = whole_slice(whole.sizes());
  slice.offsets[0] = begin;
  slice.sizes[0] = count;
  return slice;
}

TEST(CatalogReader, ReadsAnyBoxOfAnyBoxes) {
  const Folder folder;
  std::mt19937 lot(7);
  const auto drawn = [&](int64_t below) { return static_cast<int64_t>(lot() % static_cast<uint64_t>(below)); };
  for (int round = 0; round < 60; round++) {
    const bool large = round % 10 == 0;  // more than is read at once
    const auto whole = at::rand({1 + drawn(large ? 300 : 9), 1 + drawn(7), 1 + drawn(large ? 900 : 9)});
    Scattered scattered(folder / "values");
    auto missing = std::vector{whole_slice(whole.sizes())};
    for (int cut = 0; cut < 3; cut++) {  // boxes that do not overlap
      const auto slice = missing.front();
      auto part = slice;
      for (size_t d = 0; d < 3; d++) part.sizes[d] = 1 + drawn(slice.sizes[d]);
      const std::vector<int64_t> orders[] = {{0, 1, 2}, {2, 1, 0}, {1, 0, 2}};
      scattered.add(whole, part, orders[lot() % 3]);
      missing.erase(missing.begin());
      std::ranges::move(difference(slice, part), std::back_inserter(missing));
      if (missing.empty()) break;
    }
    for (const auto& slice : missing) scattered.add(whole, slice, {0, 1, 2});
    const CatalogReader reader(scattered.catalog(whole));
    EXPECT_TRUE(same_values(reader.read("w"), whole));
    auto wanted = whole_slice(whole.sizes());
    for (size_t d = 0; d < 3; d++) {
      wanted.offsets[d] = drawn(whole.size(static_cast<int64_t>(d)));
      wanted.sizes[d] = drawn(whole.size(static_cast<int64_t>(d)) - wanted.offsets[d] + 1);
    }
    const auto part = at::empty({wanted.sizes[2], wanted.sizes[1], wanted.sizes[0]}, at::kDouble).permute({2, 1, 0});
    reader.read("w", wanted, part);
    EXPECT_TRUE(same_values(part.to(at::kFloat), view_of(whole, wanted)));
  }
}

TEST(CatalogReader, TakesValuesThatAreThereTwiceOnce) {
  const Folder folder;
  const auto whole = at::arange(12).view({6, 2});
  Scattered scattered(folder / "values");
  scattered.add(whole, rows(whole, 0, 4), {0, 1});
  scattered.add(whole, rows(whole, 2, 4), {1, 0});
  EXPECT_TRUE(same_values(CatalogReader(scattered.catalog(whole)).read("w"), whole));
}

TEST(CatalogReader, NamesWhatIsMissing) {
  const Folder folder;
  const auto whole = at::arange(12).view({6, 2});
  Scattered scattered(folder / "values");
  scattered.add(whole, rows(whole, 0, 2), {0, 1});
  scattered.add(whole, rows(whole, 4, 2), {0, 1});
  const CatalogReader reader(scattered.catalog(whole));
  EXPECT_THAT(message_of<IoError>([&] { reader.read("w"); }), HasSubstr("lack values of 'w', the first of them at [2, 0]"));
  const auto part = at::empty({2, 2}, at::kLong);
  reader.read("w", rows(whole, 4, 2), part);
  EXPECT_TRUE(same_values(part, whole.narrow(0, 4, 2)));
  EXPECT_THAT(message_of<IoError>([&] { reader.read("v"); }), HasSubstr("no tensor 'v'"));
}

TEST(CatalogReader, TakesScalarsAndEmptyTensors) {
  const Folder folder;
  const auto scalar = at::scalar_tensor(3.5), empty = at::empty({0, 4});
  Scattered one(folder / "one");
  one.add(scalar, whole_slice(scalar.sizes()), {});
  EXPECT_TRUE(same_values(CatalogReader(one.catalog(scalar)).read("w"), scalar));
  Scattered other(folder / "other");
  EXPECT_EQ(CatalogReader(other.catalog(empty)).read("w").sizes(), empty.sizes());
}

TEST(CatalogReader, RefusesViewsForWhichNoMemoryIsEnough) {
  const Folder folder;
  const auto view_of_one = [&](int64_t rows) {
    Scattered scattered(folder / "values");
    const auto one = at::full({1, 1}, 2.5);
    scattered.add(one, whole_slice(one.sizes()), {0, 1});
    auto catalog = scattered.catalog(one);
    auto& tensor = catalog.tensors.at("w");
    tensor.shape = {rows, 1};
    tensor.boxes.front().box = whole_slice(tensor.shape);
    tensor.boxes.front().strides = {0, 1};
    return catalog;
  };
  EXPECT_TRUE(same_values(CatalogReader(view_of_one(3)).read("w"), at::full({3, 1}, 2.5)));
  EXPECT_THAT(message_of<IoError>([&] { CatalogReader(view_of_one(int64_t{1} << 40)); }),
              HasSubstr("repeats 1 stored values more than 1024 times"));
}

TEST(CatalogReader, RefusesFilesThatCanNotHoldTheTensors) {
  const Folder folder;
  const auto whole = at::arange(12).view({6, 2});
  const auto catalog = [&] {
    Scattered scattered(folder / "values");
    scattered.add(whole, whole_slice(whole.sizes()), {0, 1});
    return scattered.catalog(whole);
  };
  const auto refused = [](Catalog damaged) { return message_of<IoError>([&] { CatalogReader reader(std::move(damaged)); }); };
  const auto changed = [&](const std::function<void(StoredBox&)>& change) {
    auto damaged = catalog();
    change(damaged.tensors.at("w").boxes.front());
    return refused(std::move(damaged));
  };
  EXPECT_THAT(changed([](StoredBox& box) { box.offset = 10; }), HasSubstr("'w' extends past the end of the file, which has 103 bytes"));
  EXPECT_THAT(changed([](StoredBox& box) { box.offset = ~0ULL; }), HasSubstr("past the end"));
  EXPECT_THAT(changed([](StoredBox& box) { box.strides = {int64_t{1} << 61, 1}; }), HasSubstr("past the end"));
  EXPECT_THAT(changed([](StoredBox& box) { box.strides = {INT64_MAX, 1}; }), HasSubstr("make no sense"));
  EXPECT_THAT(changed([](StoredBox& box) { box.strides = {-1, 1}; }), HasSubstr("make no sense"));
  EXPECT_THAT(changed([](StoredBox& box) { box.strides = {1}; }), HasSubstr("outside of its shape"));
  EXPECT_THAT(changed([](StoredBox& box) { box.box.offsets = {3, 0}; }), HasSubstr("outside of its shape"));
  auto gone = catalog();
  gone.files.front() = folder / "nothing";
  EXPECT_THAT(refused(gone), HasSubstr("can't open"));
}

}  // namespace
}  // namespace tessera::testing::catalog_test
