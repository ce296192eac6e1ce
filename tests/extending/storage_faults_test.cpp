// Stores that list late, take other bytes than they are given, or give back other bytes than they have: a save either says so, or can be
// loaded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <atomic>
#include <functional>

#include "memory_storage.h"
#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::extending_storage_faults_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The own store with faults.
class FaultyStorage : public own::MemoryStorage {
 public:
  bool lists_late = false;  // nothing that was written since then
  /// Changes an object on its way into the store.
  std::function<void(const std::string& name, std::string& bytes)> spoil = {};
  /// Changes what a read gives, by its number.
  std::function<void(int64_t number, std::span<std::byte> bytes)> misread = {};

  std::vector<std::string> list(const std::string& start) override {
    if (!lists_late) return MemoryStorage::list(start);
    return {};
  }
  void read(const std::string& name, uint64_t offset, std::span<std::byte> to) override {
    MemoryStorage::read(name, offset, to);
    if (misread) misread(reads_++, to);
  }
  std::unique_ptr<Upload> create(const std::string& name) override {
    return std::make_unique<Spoiled>(MemoryStorage::create(name), name, spoil);
  }
  int64_t reads() const { return reads_; }
  void count_anew() { reads_ = 0; }

 private:
  struct Spoiled : Upload {
    Spoiled(std::unique_ptr<Upload> inner, std::string name, std::function<void(const std::string&, std::string&)> spoil)
        : inner(std::move(inner)), name(std::move(name)), spoil(std::move(spoil)) {}
    void write(int part, std::span<const std::byte> bytes) override {
      std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      if (spoil) spoil(name, text);
      inner->write(part, std::as_bytes(std::span(text)));
    }
    void complete() override { inner->complete(); }

    std::unique_ptr<Upload> inner;
    std::string name;
    std::function<void(const std::string&, std::string&)> spoil;
  };

  std::atomic<int64_t> reads_ = 0;
};

class StoreFaults : public ::testing::Test {
 protected:
  void SetUp() override { use_storage("faulty", store_); }
  void TearDown() override { use_storage("faulty", nullptr); }

  const std::shared_ptr<FaultyStorage> store_ = std::make_shared<FaultyStorage>();
};

std::map<std::string, at::Tensor> saved_to(const std::filesystem::path& folder, const Communicator& world, int64_t steps) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
  for (int64_t i = 0; i < steps; i++) {
    net(input(i)).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  checkpoint::save(folder, {.model = net.get(), .optimizer = &optimizer}, world);
  return checkpoint::full_state_dict(*net);
}

std::map<std::string, at::Tensor> loaded_from(const std::filesystem::path& folder, const Communicator& world) {
  auto net = seeded_net();
  fully_shard(net, {.mesh = world});
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
  checkpoint::Contents contents{.model = net.get(), .optimizer = &optimizer};
  checkpoint::load(folder, contents, world);
  return checkpoint::full_state_dict(*net);
}

std::string refused(const Communicator& world, const std::filesystem::path& folder) {
  return message_of<IoError>([&] { saved_to(folder, world, 1); });
}

TEST_F(StoreFaults, AListThatIsLateHidesNothing) {
  store_->lists_late = true;
  with_ranks(2, [&](const Communicator& world) {
    for (const int step : {1, 2}) {
      const auto folder = checkpoint::step_folder("faulty://run/net", step);
      const auto saved = saved_to(folder, world, step);
      world.barrier();
      EXPECT_TRUE(checkpoint::is_complete(folder));
      EXPECT_EQ(checkpoint::latest("faulty://run/net", world), folder);
      expect_same(loaded_from(folder, world), saved);
      EXPECT_THAT(refused(world, folder), HasSubstr("already; save under another name"));
    }
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    checkpoint::AsyncSaver saver(world);
    saver.save("faulty://run/beside", {.model = net.get()});
    saver.wait();
  });
  EXPECT_THAT(checkpoint::verify("faulty://run/beside").faults, IsEmpty());
  const Folder folder;
  checkpoint::convert(checkpoint::step_folder("faulty://run/net", 2), folder / "dcp",
                      {.to = checkpoint::Format::Dcp, .settings = {{"lr", 0.1}}});
  checkpoint::convert(folder / "dcp", "faulty://run/again", {.world = 3});
  EXPECT_TRUE(checkpoint::diff(checkpoint::step_folder("faulty://run/net", 2), "faulty://run/again").different.empty());
}

TEST_F(StoreFaults, WhatIsSpoiledOnItsWayIsSaid) {
  const std::vector<std::function<void(std::string&)>> ways = {
      [](std::string& bytes) { bytes += " "; },
      [](std::string& bytes) { bytes.clear(); },
      [](std::string& bytes) { bytes[bytes.size() / 2] ^= 1; },
      [](std::string& bytes) { bytes.back() ^= 1; },
      [](std::string& bytes) { bytes.resize(bytes.size() - 1); },
  };
  for (const auto* object : {"manifest.json", "rank-0-of-2.safetensors", "rank-1-of-2.safetensors"}) {
    for (size_t i = 0; i < ways.size(); i++) {
      store_->spoil = [&](const std::string& name, std::string& bytes) {
        if (name.ends_with(object)) ways[i](bytes);
      };
      with_ranks(2, [&](const Communicator& world) {
        const auto folder = checkpoint::step_folder("faulty://spoiled/net", 1);
        EXPECT_THAT(refused(world, folder), AllOf(HasSubstr(object), HasSubstr("the store gives other bytes back"))) << i;
        world.barrier();
        EXPECT_FALSE(checkpoint::latest("faulty://spoiled/net", world));
      });
    }
  }
}

TEST_F(StoreFaults, WhatIsReadWronglyOnceDoesNoHarm) {
  with_ranks(2, [&](const Communicator& world) {
    store_->misread = [](int64_t, std::span<std::byte>) {};
    saved_to("faulty://read/first", world, 1);
  });
  const auto reads = store_->reads();
  EXPECT_GE(reads, 5);
  int64_t saved = 0;
  for (int64_t wrong = 0; wrong < reads; wrong++) {
    const auto folder = std::filesystem::path("faulty://read/" + std::to_string(wrong));
    store_->count_anew();
    store_->misread = [&](int64_t number, std::span<std::byte> bytes) {
      if (number == wrong) std::ranges::fill(bytes, std::byte{});
    };
    with_ranks(2, [&](const Communicator& world) {
      std::map<std::string, at::Tensor> values;
      try {
        values = saved_to(folder, world, 1);
      } catch (const IoError&) {
        return;
      }
      if (world.is_first()) saved++;
      world.barrier();
      if (world.is_first()) store_->misread = {};
      world.barrier();
      expect_same(loaded_from(folder, world), values);
    });
  }
  EXPECT_LT(saved, reads);
}

}  // namespace
}  // namespace tessera::testing::extending_storage_faults_test
