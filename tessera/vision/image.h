// Pictures: bytes in memory, and their parts.
#pragma once

#include <cstdint>

namespace tessera::vision {

/// A picture is a tensor of bytes {3, height, width}, RGB, whose channels lie together in memory (as channels_last).
struct Box {
  int64_t top = 0, left = 0, height = 0, width = 0;
};

struct ImageSize {
  int64_t height = 0, width = 0;
};

}  // namespace tessera::vision
