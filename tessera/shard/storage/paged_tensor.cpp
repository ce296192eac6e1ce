#include "tessera/shard/storage/paged_tensor.h"

#include <ATen/ATen.h>

namespace tessera {
namespace {

at::Tensor view_of(const c10::Storage& storage, c10::DispatchKeySet keys, caffe2::TypeMeta dtype, at::IntArrayRef sizes,
                   at::IntArrayRef strides, int64_t offset) {
  auto tensor = at::detail::make_tensor<c10::TensorImpl>(c10::Storage(storage), keys, dtype);
  tensor.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides, offset);
  return tensor;
}

}  // namespace

at::Tensor flat_view(const c10::Storage& storage, at::ScalarType dtype) {
  const auto numel = static_cast<int64_t>(storage.nbytes() / c10::elementSize(dtype));
  return at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device())).set_(storage, 0, {numel}, {1});
}

at::Tensor paged_view(const c10::Storage& storage, at::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t offset) {
  const auto plain = at::empty({0}, at::TensorOptions().dtype(dtype).device(storage.device()));
  return view_of(storage, plain.key_set().add(kPagingKey), plain.dtype(), sizes, strides, offset);
}

at::Tensor paged_view(const c10::Storage& storage, const at::Tensor& like, at::ScalarType dtype) {
  return view_of(storage, like.key_set(), c10::scalarTypeToTypeMeta(dtype), like.sizes(), like.strides(), like.storage_offset());
}

at::Tensor paged_alias(const at::Tensor& tensor) {
  return view_of(tensor.storage(), tensor.key_set().add(kPagingKey), tensor.dtype(), tensor.sizes(), tensor.strides(),
                 tensor.storage_offset());
}

}  // namespace tessera
