// Collectives of c10d backends: on a device whose streams lag, where a missing wait shows as a wrong number, and over gloo's own.
#include "tessera/comm/c10d/collectives.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>

#include "tessera/comm/communicator.h"
#include "tessera/comm/control/group.h"
#include "tessera/comm/self/loopback_link.h"
#include "tessera/testing/delayed_backend.h"
#include "tessera/testing/delayed_device.h"

namespace tessera::testing::collectives_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::SizeIs;

constexpr int64_t kNumel = 64;
constexpr int kRanks = 2;

/// What an engine could forget.
enum class Forgets { Nothing, Inputs, Results, Memory };

class Careless final : public Transport {
 public:
  Careless(std::unique_ptr<Transport> careful, Forgets forgets)
      : Transport(careful->traits()), careful_(std::move(careful)), forgets_(forgets) {}

  Moved all_gather(std::span<const Piece> pieces, std::span<at::Tensor> companions, const Launch& launch) override {
    return forget(launch, [&](const Launch& own) { return careful_->all_gather(pieces, companions, own); });
  }
  Moved reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& launch) override {
    return forget(launch, [&](const Launch& own) { return careful_->reduce_scatter(pieces, reduction, own); });
  }
  Moved all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& launch) override {
    return careful_->all_reduce(tensor, reduction, launch);
  }
  Moved broadcast(const at::Tensor& tensor, int root, const Launch& launch) override { return careful_->broadcast(tensor, root, launch); }
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& launch) override {
    return careful_->split(colors, std::move(part), launch);
  }

 private:
  template <class Run>
  Moved forget(Launch launch, const Run& run) const {
    if (forgets_ == Forgets::Inputs) launch.inputs = {};
    set_keeps_memory(forgets_ != Forgets::Memory);
    auto moved = run(launch);
    set_keeps_memory(true);
    if (forgets_ == Forgets::Results) moved.ready = {};
    return moved;
  }

  const std::unique_ptr<Transport> careful_;
  const Forgets forgets_;
};

Communicator world_that(Forgets forgets) {
  auto link = std::make_shared<LoopbackLink>(0, all_ranks(kRanks));
  auto transport = std::make_unique<CollectivesTransport>(GroupTraits{.name = "delayed", .device = delayed_device(), .sums = SumOrder::Any},
                                                          link, delayed_backend(0, kRanks), nullptr);
  return Communicator(std::make_shared<Group>(std::make_unique<Careless>(std::move(transport), forgets), link));
}

at::Tensor on_device(int64_t numel) {
  auto tensor = at::empty({numel}, at::TensorOptions().dtype(at::kFloat).device(delayed_device()));
  std::fill_n(tensor.data_ptr<float>(), numel, 0.0F);  // at once, on the host
  return tensor;
}

void queue_fill(const at::Tensor& tensor, float value) {
  enqueue([memory = tensor.data_ptr<float>(), count = tensor.numel(), value] { std::fill_n(memory, count, value); });
}

void queue_read(const at::Tensor& tensor, std::vector<float>& seen) {
  enqueue([memory = tensor.data_ptr<float>(), count = tensor.numel(), &seen] { seen.assign(memory, memory + count); });
}

/// What the compute stream reads of a gather whose input it has written before, as soon as each stream may run.
std::vector<float> gathered(Forgets forgets) {
  const auto world = world_that(forgets);
  const auto whole = on_device(kRanks * kNumel);
  auto own = on_device(kNumel);
  std::vector<float> seen;
  queue_fill(own, 3);
  const Piece piece{.whole = whole, .own = own};
  world.all_gather(std::span(&piece, 1)).wait();
  EXPECT_EQ(own.data_ptr<float>()[0], 0) << "the host has waited for the device";
  queue_read(whole, seen);
  run_all(forgets == Forgets::Inputs ? Current::Last : Current::First);
  return seen;
}

TEST(CollectivesOnADevice, RunBehindTheirInputsAndBeforeWhatReadsThem) {
  EXPECT_THAT(gathered(Forgets::Nothing), AllOf(SizeIs(kRanks * kNumel), Each(3)));
  EXPECT_THAT(gathered(Forgets::Inputs), Each(0)) << "it reads what is not written yet";
  EXPECT_THAT(gathered(Forgets::Results), Each(0)) << "it is read before it is there";
}

/// The sum of gradients whose memory its owner gives back as soon as the reduction is started, and writes again.
std::vector<float> reduced(Forgets forgets) {
  const auto world = world_that(forgets);
  const auto own = on_device(kNumel);
  const void* memory = nullptr;
  {
    const auto gradients = on_device(kRanks * kNumel);
    memory = gradients.data_ptr();
    queue_fill(gradients, 5);
    (void)world.reduce_scatter(std::array{Piece{.whole = gradients, .own = own}});
    world.barrier();  // it is queued on the device
  }
  const auto next = on_device(kRanks * kNumel);
  EXPECT_EQ(next.data_ptr() == memory, forgets == Forgets::Memory);
  queue_fill(next, 70);
  run_all();
  return {own.data_ptr<float>(), own.data_ptr<float>() + kNumel};
}

TEST(CollectivesOnADevice, KeepTheMemoryThatTheyRead) {
  EXPECT_THAT(reduced(Forgets::Nothing), Each(10));
  EXPECT_THAT(reduced(Forgets::Memory), Each(140)) << "it has read what came after";
}

}  // namespace
}  // namespace tessera::testing::collectives_test
