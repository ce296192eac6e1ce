#include "tessera/xla/device/storage.h"

#include <ATen/EmptyTensor.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "tessera/base/error.h"

namespace tessera::xla {
namespace {

constexpr size_t kReserved = size_t{1} << 44;

std::byte* reserve() {
  auto* const addresses = ::mmap(nullptr, kReserved, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (addresses == MAP_FAILED) {
    throw IoError("{} TB of addresses can't be reserved for the device xla: {}; they take no memory, so raise the limit on virtual memory", kReserved >> 40,
                  std::strerror(errno));
  }
  return static_cast<std::byte*>(addresses);
}

}  // namespace

std::unique_lock<std::recursive_mutex> lock_device() {
  static auto& mutex = *new std::recursive_mutex;
  return std::unique_lock(mutex);
}

LazyMemory& LazyMemory::instance() {
  static auto& memory = *new LazyMemory;  // never destroyed: tensors in static storage end after main
  return memory;
}

LazyMemory::LazyMemory() : reserved_(reserve()) {}

std::byte* LazyMemory::take_addresses(size_t size_class) {
  auto& free = free_addresses_.at(size_class);
  if (!free.empty()) {
    auto* const address = free.back();
    free.pop_back();
    return address;
  }
  const auto bytes = size_t{1} << size_class;
  if (bytes > kReserved - taken_) throw UsageError("tensors on xla have taken all of the device's {} TB of addresses: free some tensors", kReserved >> 40);
  taken_ += bytes;
  return reserved_ + taken_ - bytes;
}

c10::DataPtr LazyMemory::allocate(size_t bytes) {
  auto cell = std::make_unique<Cell>();
  const auto lock = lock_device();
  cell->size_class = static_cast<size_t>(std::bit_width(std::max(bytes, size_t{64}) - 1));
  cell->address = take_addresses(cell->size_class);
  by_address_[cell->address] = cell.get();
  cell->older = newest_;
  (newest_ ? newest_->newer : oldest_) = cell.get();
  newest_ = cell.get();
  auto* const address = cell->address;
  return {address, cell.release(), &release, c10::Device(kXla, 0)};
}

c10::DeleterFnPtr LazyMemory::raw_deleter() const { return &release; }

void LazyMemory::copy_data(void* /*to*/, const void* /*from*/, size_t /*bytes*/) const {
  throw UsageError("the bytes of a tensor on an XLA device can't be copied: copy the tensor by clone() or copy_()");
}

void LazyMemory::release(void* context) {
  const std::unique_ptr<Cell> cell(static_cast<Cell*>(context));
  auto& memory = instance();
  const auto lock = lock_device();
  (cell->newer ? cell->newer->older : memory.newest_) = cell->older;
  (cell->older ? cell->older->newer : memory.oldest_) = cell->newer;
  memory.by_address_.erase(cell->address);
  memory.free_addresses_[cell->size_class].push_back(cell->address);
}

Cell* LazyMemory::at(const void* address) {
  const auto found = by_address_.find(address);
  return found == by_address_.end() ? nullptr : found->second;
}

void LazyMemory::for_each(const std::function<void(Cell&)>& visit) {
  for (auto* cell = oldest_; cell; cell = cell->newer) visit(*cell);
}

Cell& cell_of(const at::Tensor& tensor) {
  auto* const storage = tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
  auto& memory = LazyMemory::instance();
  const auto& data = storage->_mutable_data_ptr_no_checks();
  if (data.get_deleter() == memory.raw_deleter()) return *static_cast<Cell*>(data.get_context());
  const auto lock = lock_device();
  if (auto* const cell = memory.at(data.get())) return *cell;
  storage->data_ptr();  // throws with libtorch's message if the storage is guarded
  throw UsageError("a tensor on an XLA device has no memory");
}

int64_t elements_of_storage(const at::Tensor& tensor) {
  return static_cast<int64_t>(tensor.unsafeGetTensorImpl()->unsafe_storage().nbytes() / tensor.itemsize());
}

bool is_xla(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == kXla; }

void expect_the_device(const std::optional<at::Device>& device) {
  if (!device || device->type() != kXla || device->index() <= 0) return;
  throw UsageError(
      "there is no device {}: the one device is xla:0, and each of its tensors has a value for every replica; world.replicas(tensor) "
      "returns these values, and world.from_replicas(tensors) makes a tensor of them",
      device->str());
}

at::Tensor new_tensor(c10::IntArrayRef sizes, at::ScalarType element) {
  return at::detail::empty_generic(sizes, &LazyMemory::instance(), kXlaKeys, element, std::nullopt);
}

at::Tensor new_tensor(const Value& value) {
  auto tensor = new_tensor(value.sizes(), value.element());
  cell_of(tensor).value = value;
  return tensor;
}

}  // namespace tessera::xla
