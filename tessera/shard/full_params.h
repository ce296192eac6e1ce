// Access to full tensors: keep a module unsharded for a while, or get copies of its full parameters, gradients and state.
#pragma once

#include <ATen/core/Tensor.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/shard/buffers.h"

namespace tessera {

class Unit;
class WholeGradients;

enum class Access {
  Read,
  Write,
  /// Read access to the values in the dtype of the shards, even if operators compute in another dtype: for an evaluation in float32. All
  /// guards of the same parameters then show these values, until the last guard is destroyed.
  ReadStored,
};
enum class WithGradients { No, Yes };

/// Keeps all parameters of the module unsharded as long as the object exists. Meanwhile the module's own members can be read, also through
/// raw pointers. With Access::Write they can be written as well: the destructor copies this rank's part of the values into its shards, so
/// all ranks must write the same values. Its creation is collective.
///
/// With WithGradients::Yes the members also have their whole gradients: `member.grad()`. With Access::Write, the destructor writes
/// `member.mutable_grad()` back to the gradients of the shards, and is collective. An undefined gradient removes the gradients of the
/// shards. If a gradient can't be written back, because it has another shape or is missing on some ranks, the next step or norm throws
/// UsageError.
class [[nodiscard]] FullParams {
 public:
  FullParams(FullParams&&) = default;
  FullParams& operator=(FullParams&&) = delete;
  ~FullParams();

 private:
  friend FullParams full_params(ModuleRef module, Access access, WithGradients gradients);
  FullParams() = default;

  std::vector<std::shared_ptr<Unit>> units_;
  std::vector<std::shared_ptr<WholeGradients>> gradients_;
  Access access_ = Access::Read;
};

FullParams full_params(ModuleRef module, Access access = Access::Read, WithGradients gradients = WithGradients::No);

/// Which ranks get the result of a collective: all of them, or only rank 0.
enum class Ranks { All, First };

// The functions below take a parameter's shard, or the module's own member, as in full_parameter(model->head->weight).

/// Returns a copy of the full gradient, in the shape of the parameter. Undefined if the shard has no gradient; with Ranks::First also
/// undefined on all ranks but rank 0. Collective.
at::Tensor full_grad(const at::Tensor& parameter, Ranks ranks = Ranks::All);

/// Returns a copy of this rank's unsynced gradient of a whole parameter: the sum over backward passes without a reduction (no_sync,
/// set_requires_gradient_sync), in at least float32. Undefined if there is none. Not collective.
at::Tensor unsynced_grad(const at::Tensor& parameter);

/// Returns a copy of the full parameter. With Ranks::First it is undefined on all ranks but rank 0. Collective.
at::Tensor full_parameter(const at::Tensor& parameter, Ranks ranks = Ranks::All);

/// Where copies are: on the device of the tensors, or in the memory of the host.
enum class CopyTo { Device, Host };

/// Whether copies include frozen parameters.
enum class Frozen { Included, LeftOut };

/// Returns copies of all full parameters and buffers of the module, by name; all names of a tied parameter share one copy. With
/// Ranks::First the map is empty on all ranks but rank 0. `buffers` says how the buffers of the ranks are combined in the copies; the
/// module's own buffers do not change. One unit is gathered at a time. Collective, unless the module has no units.
std::map<std::string, at::Tensor> full_state(ConstModuleRef module, Ranks ranks = Ranks::All, BufferSync buffers = BufferSync::Rank0,
                                             CopyTo to = CopyTo::Device, Frozen frozen = Frozen::Included);
/// Like full_state, for a single parameter or buffer. Throws UsageError if the module has none of that name.
at::Tensor full_tensor(ConstModuleRef module, const std::string& name, Ranks ranks = Ranks::All,
                       BufferSync buffers = BufferSync::Rank0);

}  // namespace tessera
