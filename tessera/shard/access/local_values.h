// The values of a model that this process holds, by name. Checkpoints save them and load into them.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/tensor_slice.h"
#include "tessera/comm/communicator.h"

namespace torch::nn {
class Module;
}

namespace tessera {

class Unit;
struct HeldForm;

/// The part of a sharded parameter that this process holds.
struct LocalPart {
  std::string name;
  std::vector<int64_t> shape, strides;  // the shape and strides of the unsharded parameter
  at::Tensor values;                    // flat view of the shard's memory, without the paging key; may end with padding
  std::vector<ValueRange> ranges;       // the values without padding: one range for each rank that this process represents
  at::Tensor shard = {};  // the tensor in `parameters()` that contains the values; with Listing::Flat, it contains several parameters
  int64_t offset = 0;     // index of the first value in `shard`
  std::shared_ptr<Unit> unit = {};
  size_t group = 0, parameter = 0;  // indices in the unit and in the group

  /// Whether the parameter has been neither initialised nor loaded.
  bool is_unset() const;
  /// Whether the unsharded form of the parameter still exists. If not, its module is gone or has another tensor in its place.
  bool has_member() const;
  /// Notes that the values have been written, so that is_unset() returns false.
  void note_values() const;
};

struct LocalValues {
  std::vector<LocalPart> parts = {};
  std::map<std::string, at::Tensor> outside = {};     // parameters in no unit; like buffers, they may be on the meta device
  std::map<std::string, at::Tensor> buffers = {};     // all defined buffers
  std::map<std::string, std::string> aliases = {};    // from each further name of a tied parameter to its first name
  std::map<std::string, const HeldForm*> forms = {};  // the forms of weights that are held in another form (hold_in_form)
  std::set<std::string> frozen = {};                  // parameters that don't train
  std::vector<std::shared_ptr<Unit>> units = {};
  std::set<std::string> layouts = {}, meshes = {};  // the layouts and meshes of the units, in words
};

/// The ranks over which the model, or a part of a model, is sharded; nothing if it is not sharded.
std::optional<Communicator> world_of(const torch::nn::Module& model);

/// Throws UsageError if the program may have written the unsharded form of the unit, inside full_params(module, Access::Write).
void expect_shards_current(Unit& unit);

/// To be called when all ranks have loaded the same values. Units whose parameters were all loaded are then not compared between ranks at
/// their first use.
void trust_start(const LocalValues& values, c10::function_ref<bool(const LocalPart&)> is_loaded);

/// Whether all sharded parameters have values.
bool has_values(const LocalValues& values);
/// Throws UsageError if parameters or buffers have been neither initialised nor loaded; the error names them.
void expect_values(const LocalValues& values, std::string_view what);
/// Gives memory to a tensor on the meta device, so that its values can be loaded: on the device that deferred_init has recorded for it, or
/// else on `otherwise`. Does nothing for other tensors.
void allocate_if_meta(const at::Tensor& tensor, c10::Device otherwise);

/// Returns the values of a model, or of a part of a model. Throws UsageError if the module has a shard whose unit no longer exists. With
/// `only`, the name of a parameter or buffer, checks only that value, and leaves expect_shards_current() for its unit to the caller.
LocalValues local_values(const torch::nn::Module& model, const std::optional<std::string>& only = {});

/// All-gathers a tensor for each parameter, unit by unit. `own` returns this rank's values for a part in a flat tensor of the part's size,
/// or an undefined tensor, on all ranks, if there is nothing to gather. `visit` gets the whole tensor, in memory that is freed after the
/// visit. Collective.
void gather_like(const LocalValues& model, c10::function_ref<at::Tensor(const LocalPart& part)> own,
                 c10::function_ref<void(const LocalPart& part, const at::Tensor& whole)> visit);

// The functions below are for models whose ranks do not all have the same names or values. They are collective if ranks can differ in them.

/// Returns the names of parameters and buffers that other ranks have and this rank does not, because some units are sharded over only a
/// part of the ranks.
std::set<std::string> names_elsewhere(const LocalValues& model, const Communicator& world);
/// Throws on all ranks unless each name means the same values on all ranks: UsageError if different parts of the ranks have different
/// parameters under one name, DisagreementError if parameters in no unit differ. `what`: the operation that would keep only one rank's
/// values, such as "a save".
void expect_one_value_each(const LocalValues& model, const Communicator& world, std::string_view what);
/// The same. Also throws UsageError on all ranks if a rank lacks a name that another rank has, because the operation would leave out that
/// name.
void expect_all_on_each(const LocalValues& model, const Communicator& world, std::string_view what);

}  // namespace tessera
