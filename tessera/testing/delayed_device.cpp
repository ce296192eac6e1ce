#include "tessera/testing/delayed_device.h"

#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>
#include <c10/core/Allocator.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <map>
#include <utility>
#include <vector>

#include "tessera/testing/one_device.h"

namespace tessera::testing {
namespace {

constexpr auto kDelayed = c10::DeviceType::PrivateUse1;
const c10::Device kDelayedDevice(kDelayed, 0);

// --- Streams and events ---

/// An event: it has passed when the stream has run `position` steps.
struct Mark {
  c10::StreamId stream = 0;
  size_t position = 0;
};

struct Step {
  Mark after;
  std::function<void()> work;
};

struct Queue {
  std::deque<Step> steps;
  size_t finished = 0;
};

/// Indexed by stream id; 0 is the default stream. Never destroyed, because queued work may hold tensors.
std::deque<Queue>& queues() {
  static auto* const all = new std::deque<Queue>(1);
  return *all;
}

Queue& queue(c10::StreamId stream) {
  return queues().at(static_cast<size_t>(stream));
}

c10::StreamId current = 0;

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, kDelayedDevice, id);
}

bool passed(const Mark& mark) {
  return queue(mark.stream).finished >= mark.position;
}

void run_first(Queue& queue) {
  queue.steps.front().work();
  queue.steps.pop_front();
  queue.finished++;
}

/// Runs just enough work, on all streams on which the event depends, for the event to pass.
void synchronize(const Mark& mark) {
  auto& own = queue(mark.stream);
  while (!passed(mark)) {
    synchronize(own.steps.front().after);
    run_first(own);
  }
}

struct DelayedGuard final : OneDeviceGuard {
  c10::Stream getStream(c10::Device /*device*/) const override { return stream(current); }
  c10::Stream exchangeStream(c10::Stream next) const override { return stream(std::exchange(current, next.id())); }

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {
    if (*event == nullptr) *event = new Mark;
    const auto& own = queue(stream.id());
    mark(*event) = {.stream = stream.id(), .position = own.finished + own.steps.size()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    queue(stream.id()).steps.push_back({.after = mark(event), .work = [] {}});
  }
  bool queryEvent(void* event) const override { return passed(mark(event)); }
  void synchronizeEvent(void* event) const override { synchronize(mark(event)); }
  void destroyEvent(void* event, c10::DeviceIndex /*device*/) const noexcept override { delete &mark(event); }

 private:
  static Mark& mark(void* event) { return *static_cast<Mark*>(event); }
};

// --- Memory ---

class DelayedMemory final : public c10::Allocator {
 public:
  static DelayedMemory& instance() {
    static auto* const memory = new DelayedMemory;  // tensors in static storage may outlive any other owner
    return *memory;
  }

  at::DataPtr allocate(size_t bytes) override {
    auto& free = free_[bytes];
    if (free.empty()) free.push_back(::operator new(bytes));
    auto* const address = free.back();
    free.pop_back();
    sizes_[address] = bytes;
    in_use_ += bytes;
    return {address, address, &release, kDelayedDevice};
  }
  void copy_data(void* dest, const void* src, size_t bytes) const override { std::memcpy(dest, src, bytes); }

  size_t in_use() const { return in_use_; }

 private:
  static void release(void* address) {
    auto& memory = instance();
    const auto bytes = memory.sizes_.at(address);
    memory.in_use_ -= bytes;
    memory.free_[bytes].push_back(address);
  }

  std::map<size_t, std::vector<void*>> free_;  // by size
  std::map<void*, size_t> sizes_;
  size_t in_use_ = 0;
};

at::Tensor empty_delayed(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                         std::optional<at::Device> /*device*/, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);
  return at::detail::empty_generic(sizes, &DelayedMemory::instance(), kKeys, c10::dtype_or_default(dtype), format);
}

}  // namespace

c10::Device delayed_device() {
  [[maybe_unused]] static const bool registered = [] {
    c10::register_privateuse1_backend("delayed");
    c10::SetAllocator(kDelayed, &DelayedMemory::instance());
    static const c10::impl::DeviceGuardImplRegistrar guard(kDelayed, new DelayedGuard);  // libtorch never frees it
    static torch::Library aten(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
    aten.impl("empty.memory_format", &empty_delayed);
    aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));  // views of a storage need no values
    return true;
  }();
  return kDelayedDevice;
}

c10::Stream new_stream() {
  queues().emplace_back();
  return stream(static_cast<c10::StreamId>(queues().size()) - 1);
}

c10::Stream current_stream() {
  return stream(current);
}

void enqueue(std::function<void()> work) {
  queue(current).steps.push_back({.after = {}, .work = std::move(work)});
}

void run(const c10::Stream& stream) {
  auto& own = queue(stream.id());
  while (!own.steps.empty() && passed(own.steps.front().after)) run_first(own);
}

size_t bytes_in_use() {
  return DelayedMemory::instance().in_use();
}

}  // namespace tessera::testing
