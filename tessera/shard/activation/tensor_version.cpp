#include "tessera/shard/activation/tensor_version.h"

#include <ATen/ATen.h>
#include <fmt/ranges.h>

#include <array>
#include <cstring>
#include <span>

#include "tessera/base/error.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/fingerprint.h"

namespace tessera::activation {
namespace {

uint64_t digest_of_bytes(std::span<const std::byte> bytes) {
  constexpr size_t kWhole = 16384, kPiece = 64, kPieces = 64;  // up to kWhole bytes are all read; of more bytes, only kPieces pieces
  if (bytes.size() <= kWhole) return fingerprint(bytes);
  std::array<std::byte, kPiece * kPieces> pieces;
  for (size_t i = 0; i < kPieces; i++) std::memcpy(&pieces[i * kPiece], &bytes[(bytes.size() - kPiece) * i / (kPieces - 1)], kPiece);
  return fingerprint(pieces);
}

}  // namespace

WeakStorage weak_storage_of(const at::Tensor& tensor) {
  return WeakStorage(tensor.storage().getWeakStorageImpl());
}

uint32_t version_of(const at::Tensor& tensor) {
  return tensor.is_inference() ? 0 : static_cast<uint32_t>(tensor.unsafeGetTensorImpl()->version_counter().current_version());
}

void expect_version(const at::Tensor& tensor, uint32_t version) {
  if (version_of(tensor) == version) return;
  refuse_change(fmt::format("a {} tensor of shape [{}] that a checkpointed segment needs to run again", c10::toString(tensor.scalar_type()),
                            fmt::join(tensor.sizes(), ", ")));
}

void refuse_change(std::string_view of_what) {
  throw UsageError(
      "{} was changed in place between forward and backward, by a step of an optimizer or an operator such as add_; run "
      "backward first, or change a copy",
      of_what);
}

void refuse_difference(std::string_view what, std::string_view advice) {
  throw UsageError("a checkpointed segment did something else when it ran again in backward: {}; {}", what, advice);
}

at::Tensor detached(const at::Tensor& tensor) {
  const BelowPaging below;
  return tensor.detach();
}

std::optional<uint64_t> digest_of(const at::Tensor& tensor) {
  if (is_paged(tensor) || !tensor.is_cpu() || !tensor.has_storage()) return std::nullopt;
  if (tensor.numel() == 0) return 0;
  const auto* const bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (bytes == nullptr) return std::nullopt;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return digest_of_bytes({bytes, static_cast<size_t>(last + 1) * tensor.itemsize()});
}

}  // namespace tessera::activation
