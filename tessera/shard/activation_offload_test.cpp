// Activations on disk: how much of them stays in memory, and the errors when the disk has no room.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <thread>

#include "tessera/base/error.h"
#include "tessera/shard/activation.h"
#include "tests/testing/folder.h"
#include "tests/testing/numbers.h"
#include "tests/testing/transports.h"

namespace tessera::testing::activation_offload_test {
namespace {

using activation::checkpoint;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr int64_t kValues = 64 * 1024;

at::Tensor chain(at::Tensor x, int count) {
  for (int i = 0; i < count; i++) x = (x * x).sin();
  return x;
}

using WeakMemory = std::vector<c10::weak_intrusive_ptr<c10::StorageImpl>>;

TEST(Offload, NeedsNoMemoryWhileTheValuesAreOnDisk) {
  const Folder folder(folder_on_disk());
  const auto x = at::ones({kValues}).set_requires_grad(true), y = at::ones({kValues}).set_requires_grad(true);
  const auto segment = [](const at::Tensor& t) { return chain(t, 2); };
  auto value = x.sin();
  WeakMemory memory;
  for (int i = 0; i < 8; i++) {
    memory.emplace_back(value.storage().getWeakStorageImpl());
    value = checkpoint({.offload = OffloadTo::Disk, .disk = {.folder = folder.path()}}, segment, value);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
  const auto in_memory = [&] { return std::ranges::count_if(memory, [](const auto& storage) { return !storage.expired(); }); };
  for (int i = 0; i < 2000 && in_memory() > 1; i++) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  EXPECT_LE(in_memory(), 1);  // x.sin() saves only x; the sin of a layer is only in the file
  value.sum().backward();
  chain(y.sin(), 16).sum().backward();
  EXPECT_TRUE(at::equal(x.grad(), y.grad()));
}

TEST(Offload, NamesTheFolderThatIsFull) {
  const Folder folder(folder_on_disk());
  const FullDisk full(1000);
  const activation::Options options{.offload = OffloadTo::Disk, .disk = {.folder = folder.path()}};
  const auto x = at::ones({1000}).set_requires_grad(true);
  EXPECT_THAT(message_of<IoError>([&] { checkpoint(options, [](const at::Tensor& t) { return t.exp(); }, x * 1); }),
              AllOf(HasSubstr("can't keep activations (activation::Options::disk)"), HasSubstr(folder.path().string())));
}

TEST(Offload, MovesTheFractionThatIsAskedFor) {
  const Folder folder(folder_on_disk());
  for (const auto& [fraction, expected] : {std::pair(0.0, 8), std::pair(0.25, 6), std::pair(0.5, 4), std::pair(1.0, 0)}) {
    const auto x = at::ones({kValues}).set_requires_grad(true);
    const activation::Options options{.offload = OffloadTo::Disk, .disk = {.folder = folder.path(), .fraction = fraction}};
    WeakMemory memory;
    auto value = x.sin();
    for (int i = 0; i < 8; i++) {
      memory.emplace_back(value.storage().getWeakStorageImpl());
      // A graph that saves nothing but the inputs of segments.
      value = checkpoint(options, [](const at::Tensor& t) { return chain(t, 1); }, value) + 1;
    }
    const auto in_memory = [&] { return std::ranges::count_if(memory, [](const auto& storage) { return !storage.expired(); }); };
    for (int i = 0; i < 2000 && in_memory() > expected; i++) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    EXPECT_EQ(in_memory(), expected) << fraction;
    value.sum().backward();
    const auto y = at::ones({kValues}).set_requires_grad(true);
    auto plain = y.sin();
    for (int i = 0; i < 8; i++) plain = chain(plain, 1) + 1;
    plain.sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), y.grad())) << fraction;
  }
}

TEST(Offload, RefusesFoldersInMemoryAndThoseThatAreNotThere) {
  const auto x = at::ones({3}).set_requires_grad(true);
  const auto refused = [&](const DiskMemoryOptions& disk) {
    return message_of<ConfigError>(
        [&] { checkpoint({.offload = OffloadTo::Disk, .disk = disk}, [](const at::Tensor& t) { return t.exp(); }, x); });
  };
  EXPECT_THAT(refused({.folder = "/nowhere"}), HasSubstr("/nowhere"));
  EXPECT_THAT(refused({.folder = "/dev/shm"}), HasSubstr("lies in memory (tmpfs)"));
  EXPECT_THAT(refused({.folder = folder_on_disk(), .fraction = 2}), HasSubstr("must be between 0 and 1"));
}

}  // namespace
}  // namespace tessera::testing::activation_offload_test
