// deferred_init: makes a module without memory for its parameters. fully_shard then computes the values of one parameter after the other
// and keeps this rank's part, so that no process ever holds the whole model.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>

#include "tessera/base/module_ref.h"
#include "tessera/base/no_copy.h"
#include "tessera/shard/options.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Tape;
class Recording;

struct DeferredInitOptions {
  /// With a seed, each random number depends only on the seed, the name of its tensor and its position in the tensor: not on the order in
  /// which a module makes its parameters, nor on the number of ranks. libtorch's generator is not used, and each rank draws only its own
  /// part of the numbers of uniform_ and normal_. Without a seed, values and the generator's state are the same as without deferred_init.
  std::optional<uint64_t> seed = {};
};

namespace detail {

class DeferredInit : NoCopy {
 public:
  explicit DeferredInit(const DeferredInitOptions& options);
  ~DeferredInit();

  /// Records the names of the module's parameters and buffers.
  void finish(const torch::nn::Module& module);

 private:
  std::shared_ptr<Tape> tape_;
  std::unique_ptr<Recording> recording_;
};

}  // namespace detail

/// Calls `construct`, which returns a module holder (`Llama(config)`) or a shared_ptr to a module, and returns its result. Records the
/// operators that it calls; tensors are on the meta device until fully_shard or materialize gives them values. Operators that change or
/// convert such tensors later are recorded as well. Tensors that are neither parameters nor buffers get their values when they are used.
template <class Construct>
auto deferred_init(Construct&& construct, const DeferredInitOptions& options = {}) {
  detail::DeferredInit recording(options);
  auto result = std::forward<Construct>(construct)();
  recording.finish(*result);
  return result;
}

/// Gives values to the parameters and buffers of a module that is not sharded. `init` fills parameters, in place of the recorded operators,
/// and tensors for which nothing was recorded, such as those of a module that was moved to the meta device. Without `init`, throws
/// UsageError with the names of the tensors for which nothing was recorded.
void materialize(ModuleRef module, const InitFunction& init = {});

}  // namespace tessera
