// While work is queued on a device, the memory that it reads or writes must stay, and its results may be used only after it has run.
#include <c10/core/StreamGuard.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "tessera/base/error.h"
#include "tessera/base/event.h"
#include "tessera/comm/control/group.h"
#include "tessera/shard/memory/unit_memory.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tests/testing/delayed_device.h"

namespace tessera::testing::event_test {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr size_t kNumel = 16, kBytes = kNumel * sizeof(float);

TaggedStoragePtr unit_storage(c10::Device device = delayed_device()) {
  return c10::make_intrusive<TaggedStorage>(StorageTag{}, kBytes, device);
}

/// The memory of a storage, also while the storage is guarded.
std::span<float> values(const TaggedStorage& storage) {
  return {static_cast<float*>(storage.memory_view(at::kFloat).data_ptr()), kNumel};
}

/// Queues a kernel that knows only addresses: it appends the values that it finds there to `seen`.
void enqueue_read(std::span<const float> source, std::vector<float>& seen) {
  enqueue([source, &seen] { seen.insert(seen.end(), source.begin(), source.end()); });
}

void enqueue_fill(std::span<float> target, float value) {
  enqueue([target, value] { std::ranges::fill(target, value); });
}

class DelayedWork : public ::testing::Test {
 protected:
  ~DelayedWork() override {
    run(compute_);
    free_retired();
    EXPECT_EQ(bytes_in_use(), 0);
  }

  const c10::Device device_ = delayed_device();
  const c10::Stream compute_ = current_stream();
  const c10::Stream other_ = new_stream();
  std::vector<float> seen_;
  std::string order_;
};

TEST_F(DelayedWork, PassesAnEventOnceTheStreamHasRun) {
  EXPECT_TRUE(Event().passed());
  EXPECT_TRUE(Event::record(device_).passed());
  enqueue([this] { order_ += 'a'; });
  const auto event = Event::record(device_);
  enqueue([this] { order_ += 'b'; });
  EXPECT_FALSE(event.passed());
  event.synchronize();
  EXPECT_TRUE(event.passed());
  EXPECT_EQ(order_, "a");
  run(compute_);
  EXPECT_EQ(order_, "ab");
}

TEST_F(DelayedWork, OnAnotherStreamComesAfterAnEventThatBlocksIt) {
  enqueue([this] { order_ += 'a'; });
  const auto event = Event::record(device_);
  {
    const c10::StreamGuard on_other(other_);
    enqueue([this] { order_ += 'b'; });
    event.block();
    enqueue([this] { order_ += 'd'; });
  }
  enqueue([this] { order_ += 'c'; });
  run(other_);
  EXPECT_EQ(order_, "b");
  run(compute_);
  run(other_);
  EXPECT_EQ(order_, "bacd");
}

TEST_F(DelayedWork, OnAnotherStreamComesAfterAnEventThatIsRecordedOnlyForIt) {
  const auto recorded = events_recorded();
  enqueue([this] { order_ += 'a'; });
  const auto event = Event::later(device_);
  event.block();
  EXPECT_FALSE(event.passed());
  EXPECT_EQ(events_recorded(), recorded) << "its own stream waits for nothing";
  {
    const c10::StreamGuard on_other(other_);
    event.block();
    enqueue([this] { order_ += 'b'; });
  }
  EXPECT_EQ(events_recorded(), recorded + 1);
  run(other_);
  EXPECT_EQ(order_, "");
  event.synchronize();
  EXPECT_EQ(order_, "a");
  run(other_);
  EXPECT_EQ(order_, "ab");
}

TEST_F(DelayedWork, ReadsTheValuesOfMemoryThatHasBeenReleased) {
  const auto first = unit_storage(), second = unit_storage();
  first->allocate("unit");
  std::ranges::fill(values(*first), 1.0F);
  enqueue_read(values(*first), seen_);
  first->release();
  EXPECT_EQ(free_retired(), 1);
  {
    const c10::StreamGuard on_other(other_);
    second->allocate("unit");
    enqueue_fill(values(*second), 2);
  }
  EXPECT_EQ(bytes_in_use(), kBytes) << "the memory is reused";
  run(other_);
  run(compute_);
  EXPECT_THAT(seen_, AllOf(SizeIs(kNumel), Each(1.0F))) << "the write should have waited";
  run(other_);
  EXPECT_THAT(values(*second), Each(2.0F));
}

TEST_F(DelayedWork, KeepsReleasedMemoryOfWhichThereIsAView) {
  const auto first = unit_storage(), second = unit_storage();
  first->allocate("unit");
  const auto view = first->memory_view(at::kFloat);
  enqueue([] {});
  first->release();
  second->allocate("unit");
  EXPECT_EQ(bytes_in_use(), 2 * kBytes);
}

TEST_F(DelayedWork, OfUnitsInTurnTakesTheMemoryOfThoseUnderWay) {
  size_t peak = 0;
  for (int i = 0; i < 6; i++) {
    const auto unit = unit_storage();
    unit->allocate("unit");
    peak = std::max(peak, bytes_in_use());
    enqueue_fill(values(*unit), static_cast<float>(i));
    enqueue_read(values(*unit).first(1), seen_);
    unit->release();
  }
  EXPECT_EQ(peak, kBytes) << "however far the host is ahead of the device";
  run(compute_);
  EXPECT_THAT(seen_, ElementsAre(0, 1, 2, 3, 4, 5));
}

/// Bytes that the host's allocator has handed out on this thread and not got back.
class HostMemory final : public c10::MemoryReportingInfoBase {
 public:
  int64_t bytes = 0;
  bool memoryProfilingEnabled() const override { return true; }
  void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override { bytes += size; }
};

TEST(HostWork, IsNeverQueuedSoReleasedMemoryIsFreedAtOnce) {
  const auto host = std::make_shared<HostMemory>();
  const c10::DebugInfoGuard reported(c10::DebugInfoKind::PROFILER_STATE, host);
  const auto storage = unit_storage(at::kCPU);
  storage->allocate("unit");
  EXPECT_EQ(host->bytes, kBytes);
  storage->release();
  EXPECT_EQ(host->bytes, 0);
  EXPECT_EQ(free_retired(), 0);
}

/// One of two ranks, whose gathers run on a stream of their own. The other one has the same values.
class StreamTransport final : public Transport {
 public:
  explicit StreamTransport(c10::Stream stream)
      : Transport({.name = "streams", .size = 2, .topology = Topology::one_host(2), .device = stream.device()}), stream_(stream) {}

  Moved run(const Request& request, const Launch& start) override {
    if (request.operation != Operation::AllGather) refuse();
    const c10::StreamGuard on_own_stream(stream_);
    start.inputs.block();
    for (const auto& piece : request.pieces) {
      enqueue([to = piece.whole.data_ptr(), from = piece.own.data_ptr(), bytes = piece.own.nbytes()] {
        for (const size_t place : {size_t{0}, bytes}) std::memcpy(static_cast<std::byte*>(to) + place, from, bytes);
      });
    }
    return {.ready = Event::record(stream_.device())};
  }
  std::unique_ptr<Transport> split(std::span<const int> /*colors*/, std::shared_ptr<Link> /*part*/) override { refuse(); }

 private:
  [[noreturn]] static void refuse() { throw UsageError("this engine of a test knows all_gather alone"); }

  const c10::Stream stream_;
};

class DelayedGather : public DelayedWork {
 protected:
  DelayedGather() {
    enqueue_fill({own_.mutable_data_ptr<float>(), kNumel / 2}, 3.0F);  // an optimizer's step that is still queued
  }

  const c10::Stream& gather_stream_ = other_;
  const at::Tensor own_ = at::empty({kNumel / 2}, at::TensorOptions().dtype(at::kFloat).device(device_));
  const TaggedStoragePtr unsharded_ = unit_storage();
  const CodecPtr codec_ = cast_codec({});
  const std::array<Buffer, 1> buffers_ = {Buffer{.unsharded = unsharded_, .own = own_, .codec = codec_.get()}};
  const UnitMemory memory_ = gathered_memory(Communicator(std::make_shared<Group>(std::make_unique<StreamTransport>(gather_stream_))));
};

TEST_F(DelayedGather, IsWaitedForByTheComputeStreamAndNotByTheHost) {
  for (const auto& work : memory_.chunks->fill(buffers_, {}, {})) work.wait();
  enqueue_read(values(*unsharded_), seen_);
  run(gather_stream_);
  run(compute_);
  EXPECT_THAT(seen_, IsEmpty());
  run(gather_stream_);
  run(compute_);
  EXPECT_THAT(seen_, AllOf(SizeIs(kNumel), Each(3.0F)));
  memory_.release(buffers_, {});
}

TEST_F(DelayedGather, KeepsTheMemoryOfAUnitThatIsReshardedBeforeItIsThere) {
  memory_.release(buffers_, memory_.chunks->fill(buffers_, {}, {}));
  const auto next = unit_storage();
  next->allocate("unit");
  EXPECT_EQ(bytes_in_use(), kBytes / 2 + kBytes) << "the unit's own part, and its unsharded memory, which `next` reuses";
  enqueue_fill(values(*next), 9);
  enqueue_read(values(*next), seen_);
  run(compute_);
  EXPECT_THAT(seen_, IsEmpty()) << "the gather has not written it yet";
  run(gather_stream_);
  run(compute_);
  EXPECT_THAT(seen_, AllOf(SizeIs(kNumel), Each(9.0F)));
}

}  // namespace
}  // namespace tessera::testing::event_test
