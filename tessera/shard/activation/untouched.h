// Untouched: what a later run of a segment must leave as it is, because the first one has changed it for good.
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

struct Log;

/// The buffers of a module, and the memory that the first run has changed by operators: later ones change copies.
class Untouched {
 public:
  /// Looks at them. The module may be null.
  Untouched(const torch::nn::Module* module, const Log& log);
  /// Throws UsageError, by name, if a buffer was changed since then: assigned, or written through a pointer.
  void expect() const;

 private:
  struct Buffer {
    std::string name;
    at::Tensor tensor;
    std::optional<uint64_t> values;
  };
  struct Memory {
    c10::Storage storage;
    std::optional<uint64_t> values;
  };

  const torch::nn::Module* const module_;
  std::vector<Buffer> buffers_;
  std::vector<Memory> memory_;
};

}  // namespace tessera::activation
