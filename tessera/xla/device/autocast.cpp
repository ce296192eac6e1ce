// Autocast on the device. libtorch's own lists name the operators that compute in a narrower type, in float32, or in the widest type of
// their arguments.
#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>

#include "tessera/xla/device/kernels.h"

#define TESSERA_NARROW(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define TESSERA_WIDE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define TESSERA_WIDE_RESULT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define TESSERA_WIDEST(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)

namespace tessera::xla {

void register_autocast() {
  using at::IntArrayRef;
  using at::ScalarType;
  using at::Tensor;
  using c10::Scalar;
  auto& others = library_of("_", c10::DispatchKey::AutocastPrivateUse1);
  others.fallback(torch::CppFunction::makeFallthrough());
  auto& m = library_of("aten", c10::DispatchKey::AutocastPrivateUse1);
  AT_FORALL_LOWER_PRECISION_FP(TESSERA_NARROW)
  AT_FORALL_FP32(TESSERA_WIDE)
  AT_FORALL_FP32_SET_OPT_DTYPE(TESSERA_WIDE_RESULT)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(TESSERA_WIDEST)
  TESSERA_WIDE(binary_cross_entropy)
}

}  // namespace tessera::xla
