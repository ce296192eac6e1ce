#include "tessera/shard/activation/digest.h"

#include <array>
#include <cstddef>
#include <cstring>

#include "tessera/shard/paging/paged_tensor.h"

namespace tessera::activation {
namespace {

constexpr size_t kWhole = 16384, kPiece = 64, kPieces = 64;  // bytes that are looked at all together; otherwise so many pieces

/// The lanes of a processor work side by side only where no result waits for the one before.
class Lanes {
 public:
  void take(const std::byte* piece) {
    for (size_t i = 0; i < lanes_.size(); i++) {
      uint64_t word = 0;
      std::memcpy(&word, piece + 8 * i, 8);
      lanes_[i] = (lanes_[i] ^ word) * 0x9e3779b97f4a7c15ULL;
      lanes_[i] ^= lanes_[i] >> 32;
    }
  }
  uint64_t result(uint64_t hash) const {
    for (const auto lane : lanes_) hash = mixed(hash, lane);
    return hash;
  }

 private:
  std::array<uint64_t, kPiece / 8> lanes_ = {};
};

uint64_t digest_of_bytes(const std::byte* bytes, size_t size) {
  Lanes lanes;
  if (size > kWhole) {
    for (size_t i = 0; i < kPieces; i++) lanes.take(bytes + (size - kPiece) * i / (kPieces - 1));
    return lanes.result(size);
  }
  size_t at = 0;
  for (; at + kPiece <= size; at += kPiece) lanes.take(bytes + at);
  if (at < size) {
    std::array<std::byte, kPiece> rest = {};
    std::memcpy(rest.data(), bytes + at, size - at);
    lanes.take(rest.data());
  }
  return lanes.result(size);
}

}  // namespace

std::optional<uint64_t> digest_of(const at::Tensor& tensor) {
  if (is_paged(tensor) || !tensor.is_cpu() || !tensor.has_storage()) return std::nullopt;
  if (tensor.numel() == 0) return 0;
  const auto* const bytes = static_cast<const std::byte*>(tensor.const_data_ptr());
  if (bytes == nullptr) return std::nullopt;
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); i++) last += (tensor.size(i) - 1) * tensor.stride(i);
  return digest_of_bytes(bytes, static_cast<size_t>(last + 1) * tensor.itemsize());
}

std::optional<uint64_t> digest_of(const c10::Storage& storage) {
  if (!storage.device().is_cpu() || storage.data() == nullptr) return std::nullopt;
  return digest_of_bytes(static_cast<const std::byte*>(storage.data()), storage.nbytes());
}

}  // namespace tessera::activation
