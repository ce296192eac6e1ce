// A reference to a tensor that does not keep it alive.
#pragma once

#include <ATen/core/Tensor.h>

namespace tessera {

class WeakTensor {
  using Strong = c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

 public:
  WeakTensor() : impl_(Strong()) {}
  explicit WeakTensor(const at::Tensor& tensor) : impl_(tensor.getIntrusivePtr()) {}

  /// Undefined if the tensor is gone.
  at::Tensor lock() const { return at::Tensor(impl_.lock()); }
  bool expired() const { return impl_.expired(); }

 private:
  c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> impl_;
};

}  // namespace tessera
