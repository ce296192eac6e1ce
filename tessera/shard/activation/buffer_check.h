// BufferCheck: a segment that recomputes must leave the buffers of its module as they are.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace torch::nn {
class Module;
}

namespace tessera::activation {

class BufferCheck {
 public:
  /// Looks at the buffers. The module may be null.
  explicit BufferCheck(const torch::nn::Module* module);
  /// Throws UsageError, by name, if one was changed since then: assigned, or written through a pointer.
  void expect_unchanged() const;

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;  // keeps the memory, so that no other buffer gets it
    std::optional<uint64_t> values;
  };

  const torch::nn::Module* const module_;
  std::vector<Buffer> buffers_;
};

}  // namespace tessera::activation
