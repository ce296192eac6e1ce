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
  /// Random numbers depend on this seed, the name of the tensor and the position in it, and on nothing else: not on the order in which a
  /// module makes its parameters, nor on the number of ranks. The generator is not used. uniform_ and normal_ then cost each rank only its
  /// part. Without a seed, the values are those that the module would have without deferred_init, and the generator moves as it would.
  std::optional<uint64_t> seed = {};
};

namespace detail {

class DeferredInit : NoCopy {
 public:
  explicit DeferredInit(const DeferredInitOptions& options);
  ~DeferredInit();

  /// Gives the module's tensors their names.
  void finish(const torch::nn::Module& module);

 private:
  std::shared_ptr<Tape> tape_;
  std::unique_ptr<Recording> recording_;
};

}  // namespace detail

/// Calls `construct`, which returns a module holder (`Llama(config)`) or a shared pointer to a module, and returns that. What it calls on
/// tensors is recorded; tensors are on the meta device until fully_shard or materialize gives them values. Operators that change such
/// tensors later, or convert them, are recorded as well. Tensors that neither are parameters nor buffers get their values when they are
/// used.
template <class Construct>
auto deferred_init(Construct&& construct, const DeferredInitOptions& options = {}) {
  detail::DeferredInit recording(options);
  auto result = std::forward<Construct>(construct)();
  recording.finish(*result);
  return result;
}

/// Gives values to the parameters and buffers of a module that is not sharded. `init` fills parameters in place of what was recorded, and
/// all for which nothing was: those of a module that was moved to the meta device. Without it, these are a UsageError with their names.
void materialize(ModuleRef module, const InitFunction& init = {});

}  // namespace tessera
