#include "tests/testing/silent_device.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <torch/nn/module.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <map>
#include <mutex>
#include <stdexcept>
#include <system_error>

#include "tests/testing/one_device.h"

namespace tessera::testing {
namespace {

using c10::IValue;
using torch::jit::Stack;

constexpr auto kSilent = OneDeviceGuard::kType;
const c10::Device kDevice(kSilent, 0);

std::atomic<int> reads = 0;

// --- Memory ---

/// The allocator. Each unreadable address that it returns has one readable block for each replica.
class SilentMemory final : public c10::Allocator {
 public:
  static SilentMemory& instance() {
    static auto* const memory = new SilentMemory;  // never destroyed, because tensors in static storage may be freed after main
    return *memory;
  }

  at::DataPtr allocate(size_t bytes) override {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    Block block{.pages = (bytes / page + 1) * page, .values = {}};
    for (auto& value : block.values) value = c10::GetAllocator(c10::kCPU)->allocate(bytes);
    auto* address = mmap(nullptr, block.pages, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (address == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of unreadable pages");
    const std::lock_guard lock(mutex_);
    blocks_[address] = std::move(block);
    return {address, address, &release, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* dest, const void* src, size_t bytes) const override {
    const std::lock_guard lock(mutex_);
    for (size_t i = 0; i < kReplicas; i++) std::memcpy(block(dest).values[i].get(), block(src).values[i].get(), bytes);
  }

  /// The readable block of a replica for an address of the device.
  void* readable(const void* address, int index) const {
    const std::lock_guard lock(mutex_);
    return block(address).values.at(static_cast<size_t>(index)).get();
  }

 private:
  struct Block {
    size_t pages = 0;  // size of the mapping in bytes
    std::array<at::DataPtr, kReplicas> values;
  };

  static void release(void* address) {
    auto& memory = instance();
    const std::lock_guard lock(memory.mutex_);
    const auto found = memory.blocks_.find(address);
    munmap(address, found->second.pages);
    memory.blocks_.erase(found);
  }
  const Block& block(const void* address) const {
    const auto found = blocks_.find(address);
    if (found == blocks_.end()) throw std::logic_error(fmt::format("the silent device knows no memory at {}", fmt::ptr(address)));
    return found->second;
  }

  mutable std::mutex mutex_;
  std::map<const void*, Block> blocks_;
};

bool is_silent(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kSilent;
}

// --- Operators on memory and geometry, which must not go through the fallback ---

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(sizes);
  auto* storage = impl->unsafe_storage().unsafeGetStorageImpl();
  const auto bytes = static_cast<size_t>(impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (bytes > storage->nbytes()) {
    storage->set_data_ptr_noswap(SilentMemory::instance().allocate(bytes));
    storage->set_nbytes(bytes);
  }
  return self;
}

// --- Copies between host and device ---

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  const at::AutoDispatchBelowADInplaceOrView below;
  if (!is_silent(target)) {
    reads++;
    target.copy_(replica(source, 0));
    return target;
  }
  for (int r = 0; r < kReplicas; r++) replica(target, r).copy_(is_silent(source) ? replica(source, r) : source);
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  reads++;
  return replica(self, 0).item();
}

// --- The fallback for everything else: runs the CPU operator once for each replica ---

/// The operand of the CPU operator for one replica. An empty tensor that the operator writes gets new memory, so that it can be resized.
at::Tensor operand(const at::Tensor& tensor, int index, bool written) {
  if (!is_silent(tensor)) return tensor;
  return written && tensor.numel() == 0 ? at::empty(tensor.sizes(), tensor.options().device(at::kCPU)) : replica(tensor, index);
}

/// Makes one result on the device from the results of all replicas.
IValue merged(const std::vector<IValue>& values) {
  const auto& first = values.front();
  std::vector<at::Tensor> tensors;
  if (first.isTensor()) {
    if (!first.toTensor().defined()) return first;
    for (const auto& value : values) tensors.push_back(value.toTensor());
    return upload(tensors);
  }
  if (first.isTensorList()) {
    std::vector<at::Tensor> list;
    for (size_t i = 0; i < first.toTensorVector().size(); i++) {
      tensors.clear();
      for (const auto& value : values) tensors.push_back(value.toTensorVector().at(i));
      list.push_back(upload(tensors));
    }
    return list;
  }
  if (!first.isNone()) reads++;
  return first;
}

bool writes(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

/// Resizes an output of the operator if the CPU operator has resized the CPU tensors that operand() made for it, and copies their values.
void follow(const at::Tensor& target, const std::vector<Stack>& own, size_t argument) {
  if (!is_silent(target) || target.sizes() == own[0][argument].toTensor().sizes()) return;
  target.resize_(own[0][argument].toTensor().sizes());
  for (int r = 0; r < kReplicas; r++) replica(target, r).copy_(own[r][argument].toTensor());
}

void run_on_replicas(const c10::OperatorHandle& op, Stack* stack) {
  const at::AutoDispatchBelowADInplaceOrView below;
  const auto& schema = op.schema();
  for (const auto& result : schema.returns()) {
    const bool view = result.alias_info() != nullptr && !result.alias_info()->isWrite();
    TORCH_CHECK(!view, "the silent device has no kernel for the view ", op.operator_name(), "; a copy would lose later writes");
  }
  const auto operands = torch::jit::pop(*stack, schema.arguments().size());
  std::vector<Stack> own(kReplicas);
  std::vector<std::vector<IValue>> results(schema.returns().size());
  for (int r = 0; r < kReplicas; r++) {
    for (size_t i = 0; i < operands.size(); i++) {
      const bool written = writes(schema.arguments()[i]);
      own[r].push_back(mapped(operands[i], at::kCPU, [&](const at::Tensor& tensor) { return operand(tensor, r, written); }));
    }
    auto stack_of_one = own[r];
    op.callBoxed(&stack_of_one);
    for (size_t i = 0; i < results.size(); i++) results[i].push_back(stack_of_one[i]);
  }
  for (size_t i = 0; i < operands.size(); i++) {
    if (writes(schema.arguments()[i]) && operands[i].isTensor()) follow(operands[i].toTensor(), own, i);
  }
  for (size_t i = 0; i < results.size(); i++) {
    if (schema.returns()[i].alias_info() == nullptr) {
      stack->push_back(merged(results[i]));
      continue;
    }
    push_written(op, i, operands, *stack);
  }
}

/// One device with one stream, on which all work is finished at once.
struct Guard final : OneDeviceGuard {
  c10::Stream getStream(c10::Device /*device*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  c10::Stream exchangeStream(c10::Stream /*stream*/) const override { return c10::Stream(c10::Stream::DEFAULT, kDevice); }
  void record(void** /*event*/, const c10::Stream& /*stream*/, c10::DeviceIndex /*device*/, c10::EventFlag /*flag*/) const override {}
  void block(void* /*event*/, const c10::Stream& /*stream*/) const override {}
  bool queryEvent(void* /*event*/) const override { return true; }
  bool queryStream(const c10::Stream& /*stream*/) const override { return true; }
  void synchronizeStream(const c10::Stream& /*stream*/) const override {}
};

}  // namespace

at::Device silent_device() {
  static const bool registered = [] {
    auto& aten = register_device<SilentMemory, run_on_replicas>("silent", new Guard, new OneDeviceHooks);
    aten.impl("set_.source_Storage_storage_offset", &set_storage);
    aten.impl("resize_", &resize);
    aten.impl("_copy_from", &copy_from);
    aten.impl("_local_scalar_dense", &local_scalar);
    return true;
  }();
  (void)registered;
  return kDevice;
}

at::Tensor replica(const at::Tensor& tensor, int index) {
  const at::AutoDispatchBelowADInplaceOrView below;
  auto* storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  const auto* address = storage->_mutable_data_ptr_no_checks().get();
  if (address == nullptr) storage->data_ptr();  // throws with the message of a guarded storage
  at::DataPtr memory(SilentMemory::instance().readable(address, index), at::kCPU);
  const c10::Storage readable(c10::Storage::use_byte_size_t(), storage->nbytes(), std::move(memory));
  return at::empty({0}, tensor.options().device(at::kCPU)).set_(readable, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

at::Tensor upload(std::span<const at::Tensor> values) {
  const at::NoGradGuard no_grad;
  const auto& first = values.front();
  auto result = at::empty_like(first, first.options().device(silent_device()));
  for (int r = 0; r < kReplicas; r++) {
    const auto& value = values[static_cast<size_t>(r)];
    TORCH_CHECK(value.sizes() == first.sizes(), "replicas of one tensor have one size, not ", value.sizes(), " and ", first.sizes());
    replica(result, r).copy_(value);
  }
  return result;
}

std::vector<at::Tensor> download(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  reads++;
  std::vector<at::Tensor> values;
  for (int r = 0; r < kReplicas; r++) values.push_back(replica(tensor, r).clone());
  return values;
}

void move_to_silent_device(const torch::nn::Module& module) {
  const at::NoGradGuard no_grad;
  const auto move = [](const at::Tensor& tensor) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(tensor.to(silent_device()).getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) move(parameter);
  for (const auto& buffer : module.buffers()) move(buffer);
}

int host_reads() {
  return reads;
}

}  // namespace tessera::testing
