// Places: under which keys another program has put its model and its optimizer.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {

/// What is known of a model, by which a checkpoint of another program is understood.
struct ModelNames {
  std::set<std::string> all = {};                         // of parameters and buffers
  std::vector<std::vector<std::string>> parameters = {};  // each that must be there, with all its names
  std::vector<std::vector<std::string>> groups = {};      // of the optimizer's parameters, where these may be known by numbers there
};

struct Places {
  std::string model = {};                      // what the names of the model's tensors begin with, such as "app.model."
  std::optional<std::string> optimizer = {};   // the same of the optimizer's state and settings, if there is one
  std::set<std::string> other_optimizers = {};  // of several, those that nothing tells apart
  std::string around = {};                     // the key that is around all of it: "app."

  /// Whether a name is of an optimizer, whichever.
  bool is_of_optimizer(const std::string& name) const;
};

/// Looks for them by the names that programs give these keys, and by what lies under them: an optimizer has param_groups, or state like
/// that of Adam for tensors that are also outside of it, and the model has all parameters. These are known from the optimizer's state, or
/// given.
Places places_in(const Catalog& catalog, const ModelNames& names);

/// What DistributedDataParallel puts before names.
inline constexpr std::string_view kDistributed = "module.";

/// Whether a text has digits and nothing else.
bool is_number(std::string_view text);

/// A name without what torch.compile and FSDP put between the names of modules.
std::string without_wrappers(const std::string& name);

/// Whether the tensor can be the state of torch's CPU generator.
bool is_generator_state(const StoredTensor& tensor);

}  // namespace tessera::checkpoint
