#include "tests/testing/delayed_device.h"

#include <ATen/ATen.h>
#include <c10/core/Allocator.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <numeric>
#include <utility>
#include <vector>

#include "tessera/base/event.h"
#include "tests/testing/one_device.h"

namespace tessera::testing {
namespace {

using c10::IValue;
using torch::jit::Stack;

/// Recursive, because queued work may use the device. The thread of a queue of operations locks it, too.
std::recursive_mutex& device_mutex() {
  static auto* const mutex = new std::recursive_mutex;
  return *mutex;
}
using Locked = std::lock_guard<std::recursive_mutex>;

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

thread_local c10::StreamId current = 0;

std::atomic<size_t> waits = 0;
std::atomic<size_t> recorded = 0;
thread_local size_t waits_of_thread = 0;

c10::Stream stream(c10::StreamId id) {
  return c10::Stream(c10::Stream::UNSAFE, OneDeviceGuard::device(), id);
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

  c10::Stream getStreamFromGlobalPool(c10::Device /*device*/, bool /*high*/) const override { return new_stream(); }
  c10::Stream getNewStream(c10::Device /*device*/, int /*priority*/) const override { return new_stream(); }
  void recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const override;

  void record(void** event, const c10::Stream& stream, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {
    const Locked locked(device_mutex());
    if (*event == nullptr) *event = new Mark;
    recorded++;
    const auto& own = queue(stream.id());
    mark(*event) = {.stream = stream.id(), .position = own.finished + own.steps.size()};
  }
  void block(void* event, const c10::Stream& stream) const override {
    const Locked locked(device_mutex());
    queue(stream.id()).steps.push_back({.after = mark(event), .work = [] {}});
  }
  bool queryEvent(void* event) const override {
    const Locked locked(device_mutex());
    return passed(mark(event));
  }
  void synchronizeEvent(void* event) const override {
    const Locked locked(device_mutex());
    if (passed(mark(event))) return;
    waits++;
    waits_of_thread++;
    synchronize(mark(event));
  }
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
    const Locked locked(device_mutex());
    std::erase_if(kept_, [&](void* address) {
      const bool is_free = std::ranges::all_of(uses_[address], passed);
      if (is_free) give_back(address);
      return is_free;
    });
    TORCH_CHECK_WITH(OutOfMemoryError, in_use_ + bytes <= room, "the delayed device has no room for ", bytes, " bytes");
    auto& free = free_[{current, bytes}];
    if (free.empty()) free.push_back(::operator new(bytes));
    auto* const address = free.back();
    free.pop_back();
    pools_[address] = {current, bytes};
    in_use_ += bytes;
    return {address, address, &release, OneDeviceGuard::device()};
  }
  void copy_data(void* dest, const void* src, size_t bytes) const override { std::memcpy(dest, src, bytes); }

  size_t in_use() const { return in_use_; }
  size_t room = std::numeric_limits<size_t>::max();

  void note_use(void* address, const Mark& end) { uses_[address].push_back(end); }

 private:
  static void release(void* address) {
    const Locked locked(device_mutex());
    auto& memory = instance();
    if (std::ranges::all_of(memory.uses_[address], passed)) return memory.give_back(address);
    memory.kept_.push_back(address);
  }

  void give_back(void* address) {
    const auto& pool = pools_.at(address);
    uses_.erase(address);
    in_use_ -= pool.second;
    free_[pool].push_back(address);
  }

  using Pool = std::pair<c10::StreamId, size_t>;  // the stream for which memory was allocated, and its size
  std::map<Pool, std::vector<void*>> free_;
  std::map<void*, Pool> pools_;
  std::map<void*, std::vector<Mark>> uses_;  // uses of memory by streams other than the one that it was allocated for
  std::vector<void*> kept_;                  // memory that was freed, but that streams may still use
  size_t in_use_ = 0;
};

/// Host memory that is freed once all streams that copy from or to it have done so.
class PinnedMemory final : public c10::Allocator {
 public:
  static PinnedMemory& instance() {
    static auto* const memory = new PinnedMemory;
    return *memory;
  }

  at::DataPtr allocate(size_t bytes) override {
    const Locked locked(device_mutex());
    std::erase_if(freed_, [](const Block& block) { return block.is_free(); });
    auto* const address = ::operator new(bytes);
    blocks_[address] = {.memory = std::unique_ptr<void, Delete>(address), .bytes = bytes};
    return {address, address, &release, c10::kCPU};
  }
  void copy_data(void* dest, const void* src, size_t bytes) const override { std::memcpy(dest, src, bytes); }

  bool has(const void* address) { return find(address) != nullptr; }
  void note_use(const void* address, const Mark& end) { find(address)->uses.push_back(end); }

 private:
  struct Delete {
    void operator()(void* address) const { ::operator delete(address); }
  };
  struct Block {
    std::unique_ptr<void, Delete> memory;
    size_t bytes = 0;
    std::vector<Mark> uses = {};
    bool is_free() const { return std::ranges::all_of(uses, passed); }
  };

  static void release(void* address) {
    const Locked locked(device_mutex());
    auto& memory = instance();
    memory.freed_.push_back(std::move(memory.blocks_.at(address)));
    memory.blocks_.erase(address);
    std::erase_if(memory.freed_, [](const Block& block) { return block.is_free(); });
  }

  Block* find(const void* address) {
    const auto after = blocks_.upper_bound(const_cast<void*>(address));
    if (after == blocks_.begin()) return nullptr;
    auto& [begin, block] = *std::prev(after);
    return address < static_cast<std::byte*>(begin) + block.bytes ? &block : nullptr;
  }

  std::map<void*, Block> blocks_;
  std::vector<Block> freed_;  // blocks that were freed, but that streams may still use
};

struct DelayedHooks final : OneDeviceHooks {
  c10::Allocator* getPinnedMemoryAllocator() const override { return &PinnedMemory::instance(); }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
};

std::atomic<bool> keeps_memory = true, lags = true;

void DelayedGuard::recordDataPtrOnStream(const c10::DataPtr& memory, const c10::Stream& stream) const {
  const Locked locked(device_mutex());
  const auto& own = queue(stream.id());
  if (keeps_memory) DelayedMemory::instance().note_use(memory.get(), {.stream = stream.id(), .position = own.finished + own.steps.size()});
}

// --- Operators ---

bool is_delayed(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

/// The memory of a tensor as the device knows it: an address, which nothing keeps alive.
at::Tensor on_host(const at::Tensor& tensor) {
  if (!is_delayed(tensor)) return tensor;
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto* address = static_cast<char*>(storage->_mutable_data_ptr_no_checks().get());
  if (address == nullptr && storage->nbytes() > 0) storage->data_ptr();  // throws with the message of a guarded storage
  return at::from_blob(address + tensor.storage_offset() * static_cast<int64_t>(tensor.itemsize()), tensor.sizes(), tensor.strides(),
                       tensor.options().device(at::kCPU));
}

at::Tensor shape_of(const at::Tensor& tensor) {
  return is_delayed(tensor) ? at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta)) : tensor;
}

at::Tensor on_device(const at::Tensor& shape) {
  return shape.defined() ? at::empty_strided(shape.sizes(), shape.strides(), shape.options().device(delayed_device())) : shape;
}

std::vector<at::Tensor> tensors_of(const IValue& value) {
  return value.isTensor() ? std::vector{value.toTensor()} : value.toTensorVector();
}

/// Runs an operator on shapes alone, and queues the work.
void queue_operator(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  const auto operands = torch::jit::pop(*stack, schema.arguments().size());
  Stack shapes;
  for (const auto& value : operands) shapes.push_back(mapped(value, at::kMeta, shape_of));
  auto results = shapes;
  op.callBoxed(&results);
  for (size_t i = 0; i < operands.size(); i++) {  // applies the operator's resizing
    if (operands[i].isTensor() && is_delayed(operands[i].toTensor())) operands[i].toTensor().resize_(shapes[i].toTensor().sizes());
  }
  std::vector<std::vector<at::Tensor>> made(results.size());
  for (size_t i = 0; i < results.size(); i++) {
    const auto* alias = schema.returns()[i].alias_info();
    TORCH_CHECK(alias == nullptr || alias->isWrite(), "the delayed device has no kernel for the view ", op.operator_name());
    if (alias == nullptr) {
      TORCH_CHECK(results[i].isTensor() || results[i].isTensorList(), "the delayed device can't wait for ", op.operator_name());
      stack->push_back(mapped(results[i], at::kMeta, on_device));
      for (const auto& tensor : tensors_of(stack->back())) made[i].push_back(on_host(tensor));
    }
    if (alias != nullptr) push_written(op, i, operands, *stack);
  }
  Stack host;
  for (const auto& value : operands) host.push_back(mapped(value, at::kCPU, on_host));
  enqueue([op, host, made] {
    const at::AutoDispatchBelowADInplaceOrView below;
    auto found = host;
    op.callBoxed(&found);
    for (size_t i = 0; i < made.size(); i++) {
      for (size_t k = 0; k < made[i].size(); k++) {
        if (made[i][k].defined()) made[i][k].copy_(tensors_of(found[i])[k]);
      }
    }
  });
}

/// Copies between the device and pinned memory without a wait of the host: the copy reads when the stream gets there.
bool queued_copy(const at::Tensor& source, const at::Tensor& target) {
  const auto& on_the_host = is_delayed(target) ? source : target;
  if (!on_the_host.is_cpu() || !is_pinned(on_the_host.const_data_ptr()) || source.scalar_type() != target.scalar_type()) return false;
  const auto address = [](const at::Tensor& tensor) {
    return at::from_blob(const_cast<void*>(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU));
  };
  enqueue([from = is_delayed(source) ? on_host(source) : address(source), to = is_delayed(target) ? on_host(target) : address(target)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  note_use_of_pinned(on_the_host.const_data_ptr());
  return true;
}

at::Tensor copy_delayed(const at::Tensor& source, const at::Tensor& target, bool non_blocking) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (non_blocking && queued_copy(source, target)) return target;
  if (!is_delayed(target)) {
    Event::record(delayed_device()).synchronize();
    target.copy_(on_host(source));
    return target;
  }
  enqueue([from = is_delayed(source) ? on_host(source) : source.clone(), to = on_host(target)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    to.copy_(from);
  });
  return target;
}

at::Scalar local_scalar_delayed(const at::Tensor& self) {
  Event::record(delayed_device()).synchronize();
  return on_host(self).item();
}

const at::Tensor& resize_delayed(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  if (self.sizes() == sizes) return self;
  auto made = at::empty(sizes, self.options());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(made.storage());
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

}  // namespace

c10::Device delayed_device() {
  [[maybe_unused]] static const bool registered = [] {
    auto& aten = register_device<DelayedMemory, queue_operator>("delayed", new DelayedGuard, new DelayedHooks);
    aten.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));  // views of a storage need no values
    aten.impl("resize_", &resize_delayed);
    aten.impl("_copy_from", &copy_delayed);
    aten.impl("_local_scalar_dense", &local_scalar_delayed);
    return true;
  }();
  return OneDeviceGuard::device();
}

c10::Stream new_stream() {
  const Locked locked(device_mutex());
  queues().emplace_back();
  return stream(static_cast<c10::StreamId>(queues().size()) - 1);
}

c10::Stream current_stream() {
  return stream(current);
}

void enqueue(std::function<void()> work) {
  const Locked locked(device_mutex());
  queue(current).steps.push_back({.after = {}, .work = std::move(work)});
  if (!lags) run_all();
}

void run(const c10::Stream& stream) {
  const Locked locked(device_mutex());
  auto& own = queue(stream.id());
  while (!own.steps.empty() && passed(own.steps.front().after)) run_first(own);
}

void run_all(Current when) {
  const Locked locked(device_mutex());
  const auto is_idle = [](const Queue& queue) { return queue.steps.empty(); };
  while (!std::ranges::all_of(queues(), is_idle)) {
    std::vector<c10::StreamId> order(queues().size());
    std::iota(order.begin(), order.end(), 0);
    const auto is_current = [](c10::StreamId id) { return id == current; };
    std::ranges::stable_partition(order, is_current);
    if (when == Current::Last) std::ranges::reverse(order);
    const auto can_go_on = [](c10::StreamId id) { return !queue(id).steps.empty() && passed(queue(id).steps.front().after); };
    run_first(queue(*std::ranges::find_if(order, can_go_on)));
  }
}

bool is_pinned(const void* address) {
  const Locked locked(device_mutex());
  return PinnedMemory::instance().has(address);
}

void note_use_of_pinned(const void* address) {
  const Locked locked(device_mutex());
  const auto& own = queue(current);
  PinnedMemory::instance().note_use(address, {.stream = current, .position = own.finished + own.steps.size()});
}

void set_lags(bool device_lags) {
  lags = device_lags;
}

size_t host_waits() {
  return waits;
}

size_t own_waits() {
  return waits_of_thread;
}

size_t events_recorded() {
  return recorded;
}

void set_keeps_memory(bool keeps) {
  keeps_memory = keeps;
}

void set_room(size_t bytes) {
  const Locked locked(device_mutex());
  DelayedMemory::instance().room = bytes;
}

size_t bytes_in_use() {
  return DelayedMemory::instance().in_use();
}

}  // namespace tessera::testing
