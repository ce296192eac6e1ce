#include "tessera/shard/activation/digest.h"

#include <array>
#include <cstddef>
#include <cstring>
#include <span>

#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/fingerprint.h"

namespace tessera::activation {
namespace {

uint64_t digest_of_bytes(std::span<const std::byte> bytes) {
  constexpr size_t kWhole = 16384, kPiece = 64, kPieces = 64;  // bytes that are looked at all together; otherwise so many pieces
  if (bytes.size() <= kWhole) return fingerprint(bytes);
  std::array<std::byte, kPiece * kPieces> pieces;
  for (size_t i = 0; i < kPieces; i++) std::memcpy(&pieces[i * kPiece], &bytes[(bytes.size() - kPiece) * i / (kPieces - 1)], kPiece);
  return fingerprint(pieces);
}

}  // namespace

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
