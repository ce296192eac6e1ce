// The memory of XLA devices as tensors see it: a storage has a value of the graph in place of bytes.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/Allocator.h>

#include <array>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

inline constexpr auto kXla = c10::DeviceType::PrivateUse1;
inline constexpr c10::DispatchKeySet kXlaKeys(c10::DispatchKey::PrivateUse1);

/// The current value of a storage: as many elements as the storage has, of one type, in any shape.
struct Cell {
  Value value;
  /// The buffers from the last program or upload, whose memory the next value may take.
  std::shared_ptr<const Data> before;

  Cell *newer = nullptr, *older = nullptr;
  std::byte* address = nullptr;
  size_t size_class = 0;
};

/// Allocates cells, and lists those that are alive. Each cell has unreadable addresses of its own: several storages may share a cell, and
/// if a storage knows only the address, at() finds the cell.
class LazyMemory final : public c10::Allocator {
 public:
  static LazyMemory& instance();

  c10::DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* to, const void* from, size_t bytes) const override;

  /// The cell whose addresses begin at `address`, or null.
  Cell* at(const void* address);
  /// Visits cells in the order in which they were made.
  void for_each(const std::function<void(Cell&)>& visit);

 private:
  LazyMemory();
  static void release(void* cell);

  std::byte* take_addresses(size_t size_class);

  std::byte* const reserved_;
  size_t taken_ = 0;                                       // how many bytes of `reserved_` cells have taken so far
  std::array<std::vector<std::byte*>, 48> free_addresses_;  // element n: free ranges of 2^n bytes
  std::unordered_map<const void*, Cell*> by_address_;
  Cell* newest_ = nullptr;
  Cell* oldest_ = nullptr;
};

/// Returns the cell of a tensor's storage. Throws if the storage has no memory; if libtorch's guard of the storage says why, with that
/// message.
Cell& cell_of(const at::Tensor& tensor);
int64_t elements_of_storage(const at::Tensor& tensor);

bool is_xla(const at::Tensor& tensor);
/// Throws UsageError for xla:1 and higher: there is one device, which needs no index.
void expect_the_device(const std::optional<at::Device>& device);
at::Tensor new_tensor(c10::IntArrayRef sizes, at::ScalarType element);
at::Tensor new_tensor(const Value& value);

/// Locks the device, so that only one thread traces at a time: backward passes run in the thread of autograd's engine.
std::unique_lock<std::recursive_mutex> lock_device();

}  // namespace tessera::xla
