#include "tessera/xla/device/storage.h"

#include <ATen/EmptyTensor.h>
#include <fmt/format.h>
#include <sys/mman.h>

#include <mutex>

#include "tessera/base/error.h"

namespace tessera::xla {
namespace {

constexpr size_t kReserved = size_t{1} << 40;

}  // namespace

std::unique_lock<std::recursive_mutex> lock_device() {
  static auto& mutex = *new std::recursive_mutex;
  return std::unique_lock(mutex);
}

LazyMemory& LazyMemory::instance() {
  static auto& memory = *new LazyMemory;  // tensors in static storage end after main
  return memory;
}

LazyMemory::LazyMemory() : unreadable_(::mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)) {}

c10::DataPtr LazyMemory::allocate(size_t /*bytes*/) {
  auto cell = std::make_unique<Cell>();
  const auto lock = lock_device();
  cell->older = newest_;
  (newest_ ? newest_->newer : oldest_) = cell.get();
  newest_ = cell.get();
  count_++;
  return {unreadable_, cell.release(), &release, c10::Device(kXla, 0)};
}

c10::DeleterFnPtr LazyMemory::raw_deleter() const { return &release; }

void LazyMemory::copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const {
  throw UsageError("the bytes of a tensor on an XLA device can't be copied: copy the tensor");
}

void LazyMemory::release(void* context) {
  const std::unique_ptr<Cell> cell(static_cast<Cell*>(context));
  auto& memory = instance();
  const auto lock = lock_device();
  (cell->newer ? cell->newer->older : memory.newest_) = cell->older;
  (cell->older ? cell->older->newer : memory.oldest_) = cell->newer;
  memory.count_--;
}

void LazyMemory::for_each(const std::function<void(Cell&)>& visit) {
  for (auto* cell = oldest_; cell; cell = cell->newer) visit(*cell);
}

Cell& cell_of(const at::Tensor& tensor) {
  auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto* const cell = storage->_mutable_data_ptr_no_checks().get_context();
  if (!cell) {
    storage->data_ptr();  // throws with the message of a guarded storage
    throw UsageError("a tensor on an XLA device has no memory");
  }
  return *static_cast<Cell*>(cell);
}

int64_t elements_of_storage(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() / tensor.itemsize());
}

bool is_xla(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kXla; }

at::Tensor new_tensor(c10::IntArrayRef sizes, at::ScalarType element) {
  return at::detail::empty_generic(sizes, &LazyMemory::instance(), kXlaKeys, element, std::nullopt);
}

at::Tensor new_tensor(const Value& value) {
  auto tensor = new_tensor(value.sizes(), value.element());
  cell_of(tensor).value = value;
  return tensor;
}

}  // namespace tessera::xla
