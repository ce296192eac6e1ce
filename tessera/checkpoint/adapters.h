// Callbacks that tell saves and loads about a model's adapters. The package that implements adapters builds on this one and registers them.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

struct AdapterCalls {
  std::string (*describe)(ConstModuleRef model);              // adapters in words: "default (rank 8, alpha 16)"; empty if there are none
  std::set<std::string> (*parameters)(ConstModuleRef model);  // names of the parameters of all adapters, active or not
  void (*expect_unmerged)(ConstModuleRef model);              // throws UsageError if adapters are merged
  void (*save)(ConstModuleRef model, const std::filesystem::path& folder, const Communicator& world);
};

/// Registers the callbacks: the package that implements adapters has a static object of this class.
struct AddedAdapters {
  explicit AddedAdapters(const AdapterCalls& calls);
};

/// Returns the registered callbacks. If none are registered, returns callbacks that find no adapters in any model.
const AdapterCalls& adapters();

}  // namespace tessera::checkpoint
