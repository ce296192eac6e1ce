#include "tessera/checkpoint/save_torch_xla.h"

#include <c10/util/FunctionRef.h>
#include <fmt/format.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <deque>
#include <optional>

#include "tessera/base/file_lock.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/shard_metadata.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// The modules of which units were made, and the parameters in their order.
TorchXlaOptions options_of(const torch::nn::Module& model, const Communicator& world) {
  const auto metadata = shard_metadata(model, world);
  TorchXlaOptions options{.units = {}, .flatten_parameters = !metadata.flatten_info.empty()};
  for (const auto& [unit, shards] : metadata.shard_info) {
    for (const auto& shard : shards) {
      // What is left of the name before the part that the unit knows is the module; a tied parameter may have another name in the unit.
      const auto& whole = shard.original_name;
      const auto own = metadata.flatten_info.contains(whole) ? whole.substr(whole.rfind('.') + 1) : shard.name;
      options.units.push_back(whole.ends_with("." + own) ? whole.substr(0, whole.size() - own.size() - 1) : "");
    }
  }
  for (const auto& [name, shard] : named_parameters(model)) {
    if (!shard_info(shard)) continue;  // in no unit
    std::vector<std::string> own = {name};
    if (const auto flat = metadata.flatten_info.find(name); flat != metadata.flatten_info.end()) {
      own = flat->second.names;
      for (auto& each : own) each.insert(0, name.substr(0, name.rfind('.') + 1));  // the prefix may be empty
    }
    options.parameters.insert(options.parameters.end(), own.begin(), own.end());
    if (!shard.requires_grad()) options.frozen.insert(own.begin(), own.end());
  }
  return options;
}

}  // namespace

void save_torch_xla(const fs::path& prefix, ModuleRef model, const Communicator& world,
                    const std::optional<TorchXlaOptions>& options) {
  const auto together = [&](c10::function_ref<void()> act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "checkpoint"}, fmt::format("could not save {}; nothing of this save was kept", prefix.string()));
  };
  const fs::path parts = prefix.string() + "_rank.part";
  std::optional<NamedLock> lock;  // in the process of rank 0
  together([&] {
    if (!world.is_first()) return;
    lock.emplace(lock_place(prefix.string() + "_rank"));
    expect_no_other_ranks(prefix, world.size());
    fs::remove_all(parts);  // of a program that was killed
  });
  save(parts, {.model = &*model}, world);
  std::error_code ignored;
  std::deque<TorchXlaRankFile> files;
  std::exception_ptr failure;
  bool commits = false;
  try {
    together([&] {
      const CatalogReader stored(read_model(parts));
      const auto layout = torch_xla_layout(stored.catalog(), options ? *options : options_of(model, world));
      for (const int rank : world.local_ranks()) files.emplace_back(prefix, rank, world.size(), stored, layout);
    });
    commits = true;
    together([&] {
      for (auto& file : files) file.commit();
    });
  } catch (...) {
    failure = std::current_exception();
    if (commits) {  // some have their names, beside files of an earlier save
      for (const int rank : world.local_ranks()) fs::remove(torch_xla_file(prefix, rank, world.size()), ignored);
    }
  }
  if (world.is_first()) fs::remove_all(parts, ignored);
  if (failure) std::rethrow_exception(failure);
}

std::vector<fs::path> convert_to_torch_xla(const fs::path& checkpoint, const fs::path& prefix, int ranks,
                                           const std::optional<TorchXlaOptions>& options) {
  const bool keeps_layout = !options && format_of(checkpoint) == Format::TorchXla;
  const CatalogReader stored(keeps_layout ? read_torch_xla(checkpoint) : read_model(checkpoint));
  const auto layout =
      keeps_layout ? read_torch_xla_layout(checkpoint) : torch_xla_layout(stored.catalog(), options.value_or(TorchXlaOptions{}));
  return write_torch_xla(prefix, ranks, stored, layout);
}

}  // namespace tessera::checkpoint
