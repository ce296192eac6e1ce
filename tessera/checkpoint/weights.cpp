#include "tessera/checkpoint/weights.h"

#include <optional>
#include <regex>

#include "tessera/base/error.h"
#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/dict_source.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/stored/catalogs.h"

namespace tessera::checkpoint {
namespace {

/// Turns names in files into names in the model.
class Renames {
 public:
  explicit Renames(const std::vector<std::pair<std::string, std::string>>& pairs) {
    for (const auto& [pattern, replacement] : pairs) {
      try {
        pairs_.emplace_back(std::regex(pattern), replacement);
      } catch (const std::regex_error& error) {
        throw UsageError("'{}' in the option renamed is not a regular expression: {}", pattern, error.what());
      }
    }
  }

  std::string operator()(std::string name) const {
    for (const auto& [pattern, replacement] : pairs_) name = std::regex_replace(name, pattern, replacement);
    return name;
  }

 private:
  std::vector<std::pair<std::regex, std::string>> pairs_;
};

Catalog renamed(Catalog catalog, const Renames& renames) {
  decltype(catalog.tensors) tensors;
  for (auto& [name, tensor] : catalog.tensors) {
    if (!tensors.try_emplace(renames(name), std::move(tensor)).second)
      throw UsageError("the patterns in the option `renamed` rename '{}' to '{}', which is then also the name of another tensor", name,
                       renames(name));
  }
  decltype(catalog.aliases) aliases;
  for (const auto& [alias, first] : catalog.aliases) aliases[renames(alias)] = renames(first);
  decltype(catalog.buffers) buffers;
  for (const auto& name : catalog.buffers) buffers.insert(renames(name));
  catalog.tensors = std::move(tensors);
  catalog.aliases = std::move(aliases);
  catalog.buffers = std::move(buffers);
  return catalog;
}

}  // namespace

void load_weights(ModuleRef module, const std::filesystem::path& path, const WeightsOptions& options) {
  const OuterCall call("checkpoint::load_weights");
  const auto world = world_for(module);
  ModelPlan plan(module, world, {.unit = "weights"}, path.string());
  std::optional<CatalogReader> stored;
  plan.together([&] {
    // If names are replaced, the model's names say nothing about the names in the files.
    const auto names = options.renamed.empty() ? names_of(plan.values(), options.may_be_missing) : ModelNames();
    stored.emplace(renamed(read_model(path, names), Renames(options.renamed)));
    plan.fit(source_of(*stored),
             {.may_be_missing = options.may_be_missing, .may_be_unknown = options.may_be_unknown, .first_of_tied = options.first_of_tied},
             path.string());
    const auto& topology = world.topology();
    verify_share(*stored, world, topology.ranks_on(topology.host_of(world.local_ranks().front())));  // each host may have its own files
  });
  AllOrNone reading;
  reading.attempt([&] { plan.load(); });
  plan.expect_finished(reading);
}

}  // namespace tessera::checkpoint
