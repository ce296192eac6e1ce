// ForwardPhase: marks that this thread runs the forward of a module that was called by tessera::call or FullyShardedDataParallel.
// expect_idle() refuses calls that make no sense during a pass.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "tessera/base/no_copy.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;

/// The phase lasts as long as the object. Phases nest.
class ForwardPhase : NoCopy {
 public:
  /// `unit` is the unit of the module, or null. Both must outlive the phase.
  ForwardPhase(const torch::nn::Module& module, const Unit* unit);
  ~ForwardPhase();

 private:
  friend std::optional<std::string> forward_phase();
  friend bool in_forward_of(const torch::nn::Module& module);

  const torch::nn::Module& module_;
  const Unit* const unit_;
  const ForwardPhase* const outer_;
};

/// Returns a name for messages of the module whose forward is the outermost on this thread: its path in the model, or else its class.
/// Returns nothing outside of a forward.
std::optional<std::string> forward_phase();

/// Whether this thread is in the forward of the module.
bool in_forward_of(const torch::nn::Module& module);

/// Throws UsageError if this thread runs a backward pass, or a forward pass that Tessera sees. `what` is the name of the call.
void expect_idle(std::string_view what);

}  // namespace tessera
