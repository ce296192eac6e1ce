// Places: under which keys another program has put its model and its optimizer.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// The names in a model, which help to find the model and the optimizer's state in a checkpoint of another program.
struct ModelNames {
  std::set<std::string> all = {};                         // names of parameters and buffers
  std::vector<std::vector<std::string>> parameters = {};  // all names of each parameter that a checkpoint must have
  std::vector<std::vector<std::string>> groups = {};      // names in each group of the optimizer, for state with numbers instead of names
};

struct Places {
  std::string model = {};                       // the prefix of the names of the model's tensors, such as "app.model."
  std::optional<std::string> optimizer = {};    // the prefix of the optimizer's state and param_groups, if there is one
  std::set<std::string> other_optimizers = {};  // the prefixes of further optimizers, which are not used
  std::string around = {};                      // the key that contains the keys of the model and the optimizer: "app."

  /// Whether a name belongs to any of the optimizers.
  bool is_of_optimizer(const std::string& name) const;
};

/// Finds the model and the optimizer by the keys that programs use, and by the names under these keys. Under the key of an optimizer is a
/// value param_groups, or state such as exp_avg of tensors that are also outside of this key. Under the key of the model are all
/// parameters, whose names come from `names` or from the optimizer's state.
Places places_in(const Catalog& catalog, const ModelNames& names);

/// The prefix that DistributedDataParallel gives to names.
inline constexpr std::string_view kDistributed = "module.";

/// Whether a text has digits and nothing else.
bool is_number(std::string_view text);

/// Returns a name without the parts that torch.compile and FSDP put between the names of modules.
std::string without_wrappers(const std::string& name);

/// Whether the tensor can be the state of torch's CPU generator.
bool is_generator_state(const StoredTensor& tensor);

}  // namespace tessera::checkpoint
