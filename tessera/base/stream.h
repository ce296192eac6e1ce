// A copy that bypasses the caches, for results larger than the caches. Streaming stores do not load a cache line only to overwrite it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace tessera::detail {

/// Like memcpy, also in its memory order: another thread sees the bytes once it has synchronized with this one.
inline void stream(std::byte* target, const std::byte* source, size_t bytes) {
#if defined(__SSE2__)
  constexpr size_t kLine = 64;
  const size_t head = (kLine - reinterpret_cast<uintptr_t>(target) % kLine) % kLine;
  if (bytes >= head + kLine) {
    std::memcpy(target, source, head);
    target += head;
    source += head;
    bytes -= head;
    for (; bytes >= kLine; bytes -= kLine, target += kLine, source += kLine) {
      const auto* from = reinterpret_cast<const __m128i*>(source);
      auto* to = reinterpret_cast<__m128i*>(target);
      const __m128i a = _mm_loadu_si128(from), b = _mm_loadu_si128(from + 1), c = _mm_loadu_si128(from + 2), d = _mm_loadu_si128(from + 3);
      _mm_stream_si128(to, a);
      _mm_stream_si128(to + 1, b);
      _mm_stream_si128(to + 2, c);
      _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
  }
#endif
  if (bytes > 0) std::memcpy(target, source, bytes);
}

}  // namespace tessera::detail
