// Operators that compute nothing: memory, views, and copies between host and device.
#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/NativeFunctions.h>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

at::Tensor empty(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin*/, std::optional<at::MemoryFormat> format) {
  expect_the_device(device);
  return at::detail::empty_generic(sizes, &LazyMemory::instance(), kXlaKeys, c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout> /*layout*/, std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  expect_the_device(device);
  return at::detail::empty_strided_generic(sizes, strides, &LazyMemory::instance(), kXlaKeys, c10::dtype_or_default(dtype));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage storage, int64_t offset, at::IntArrayRef sizes, at::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(storage));
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return self;
}

at::Tensor& set_whole_storage(at::Tensor& self, at::Storage storage) {
  const auto elements = static_cast<int64_t>(storage.nbytes() / self.itemsize());
  return set_storage(self, std::move(storage), 0, {elements}, {1});
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

at::Tensor& set_nothing(at::Tensor& self) {
  return set_tensor(self, new_tensor({0}, self.scalar_type()));
}

const at::Tensor& resize(const at::Tensor& self, at::IntArrayRef sizes, std::optional<at::MemoryFormat> /*format*/) {
  const auto lock = lock_device();
  auto* const tensor = self.unsafeGetTensorImpl();
  const auto before = elements_of_storage(self);
  tensor->set_sizes_contiguous(sizes);
  auto* const storage = tensor->unsafe_storage().unsafeGetStorageImpl();
  const auto needed = tensor->storage_offset() + tensor->numel();
  auto& cell = cell_of(self);
  // Shrinks only memory that has no values yet and belongs to no other tensor: libtorch's losses make a result of full size and resize it
  // to one number.
  const bool is_fresh = !cell.value && self.storage().use_count() == 1;
  if (needed == before || (needed < before && !is_fresh)) return self;
  cell.before = nullptr;  // the old buffers have another size
  if (cell.value) {
    const auto list = reshape(in_type(cell.value, self.scalar_type()), {before});
    cell.value = pad(list, hlo::constant(0, list.element()), {0}, {needed - before}, {0});
  }
  storage->set_nbytes(static_cast<size_t>(needed) * tensor->itemsize());
  return self;
}

/// Reads a value for the host, which ends the program that is being traced.
at::Tensor to_host(const at::Tensor& tensor, const char* reader) {
  const at::NoGradGuard no_grad;
  return first_replica(tensor, reader);
}

at::Tensor copy_from(const at::Tensor& source, const at::Tensor& target, bool /*non_blocking*/) {
  const auto lock = lock_device();
  if (!is_xla(target)) {
    target.copy_(to_host(source, "a copy to the CPU"));
    return target;
  }
  const at::AutoDispatchBelowADInplaceOrView below;
  if (is_xla(source)) {
    write(target, expand(read(source), target.sizes()));
    return target;
  }
  const auto values = source.resolve_conj().resolve_neg().to(target.scalar_type()).expand(target.sizes()).contiguous();
  const auto data = runner().upload({values});
  write(target, leaf(data, {values.scalar_type(), values.sizes().vec()}));
  if (target.is_contiguous() && target.numel() == elements_of_storage(target)) cell_of(target).before = data;
  return target;
}

at::Scalar local_scalar(const at::Tensor& self) {
  return to_host(self, "item()").item();
}

/// Reads no values if both tensors have the same value of the graph: libtorch's MultiheadAttention compares its query, key and value, which
/// are often one tensor.
bool equal(const at::Tensor& a, const at::Tensor& b) {
  if (a.sizes() != b.sizes()) return false;
  if (read(a) == read(b)) return true;
  return at::equal(to_host(a, "equal()"), to_host(b, "equal()"));
}

/// Makes plain zeros for _efficientzerotensor. libtorch marks such zeros by a dispatch key, to skip computations; here the compiler skips them.
at::Tensor zeros(at::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout> /*layout*/,
                 std::optional<at::Device> device, std::optional<bool> /*pin*/) {
  expect_the_device(device);
  return new_tensor(hlo::filled(0, {c10::dtype_or_default(dtype), sizes.vec()}));
}

}  // namespace

void register_plumbing() {
  auto& aten = library_of("aten", c10::DispatchKey::PrivateUse1);
  aten.impl("empty.memory_format", &empty);
  aten.impl("empty_strided", &empty_strided);
  aten.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  aten.impl("view", TORCH_FN(at::native::view));
  aten.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
  aten.impl("set_.source_Storage_storage_offset", &set_storage);
  aten.impl("set_.source_Storage", &set_whole_storage);
  aten.impl("set_.source_Tensor", &set_tensor);
  aten.impl("set_", &set_nothing);
  aten.impl("is_set_to", TORCH_FN(at::native::is_set_to));
  aten.impl("view_as_real", TORCH_FN(at::native::view_as_real));
  aten.impl("view_as_complex", TORCH_FN(at::native::view_as_complex));
  aten.impl("_efficientzerotensor", &zeros);
  aten.impl("unfold", TORCH_FN(at::native::unfold));
  aten.impl("resize_", &resize);
  aten.impl("_copy_from", &copy_from);
  aten.impl("_local_scalar_dense", &local_scalar);
  aten.impl("equal", &equal);
  // copy_from() handles the conjugate and negative bits itself. libtorch's fallback would resolve them by another copy, and that copy by
  // another, without end.
  auto& conjugated = library_of("aten", c10::DispatchKey::Conjugate);
  auto& negated = library_of("aten", c10::DispatchKey::Negative);
  conjugated.impl("_copy_from", torch::CppFunction::makeFallthrough());
  negated.impl("_copy_from", torch::CppFunction::makeFallthrough());
}

}  // namespace tessera::xla
