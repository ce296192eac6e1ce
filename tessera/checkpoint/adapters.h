// Adapters of a model, as saves and loads see them. They come from a package above this one, which registers here what it knows of them.
#pragma once

#include <filesystem>
#include <set>
#include <string>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"

namespace tessera::checkpoint {

struct AdapterCalls {
  std::string (*describe)(ConstModuleRef model);              // in words: "default (rank 8, alpha 16)"; empty if it has none
  std::set<std::string> (*parameters)(ConstModuleRef model);  // of all adapters, whether they act or not
  void (*expect_unmerged)(ConstModuleRef model);              // throws UsageError if they are merged
  void (*save)(ConstModuleRef model, const std::filesystem::path& folder, const Communicator& world);
};

/// Registers them while the package is loaded.
struct AddedAdapters {
  explicit AddedAdapters(const AdapterCalls& calls);
};

/// Those of a model that can have none, without such a package.
const AdapterCalls& adapters();

}  // namespace tessera::checkpoint
