#include "case.h"

#include <fstream>
#include <map>
#include <set>
#include <string_view>

#include "tessera/base/error.h"

namespace tessera::parity {
namespace {

/// Everything that a case can say; a word that nobody reads is an error.
constexpr std::string_view kWords =
    " section name model ranks mesh units policy class strategy reshard_after_forward reshard_after_backward gathers tessera_gathers "
    "param_dtype reduce_dtype output_dtype buffer_dtype scale frozen unused passes accumulate divide clip_norm clip_value layout "
    "shard_size_multiple listing residence shard_dim ignored replicated prefetch optimizer ours in_backward checkpoint start offload fsdp2 "
    "within noise because ";

Case read(nlohmann::json settings, const nlohmann::json& models, const std::string& section) {
  for (const auto& [word, value] : settings.items()) {
    if (kWords.find(" " + word + " ") == kWords.npos) throw UsageError("cases.json: '" + word + "' means nothing, in " + settings.dump());
  }
  Case result;
  result.section = section;
  result.name = settings.at("name");
  result.model = settings.at("model");
  result.ranks = settings.at("ranks");
  auto defaults = models.at(result.model);
  defaults.update(settings);
  result.settings = std::move(defaults);
  result.mesh = {.replicate = 1, .shard = result.ranks};
  if (result.has("mesh")) result.mesh = {.replicate = result.settings["mesh"][0], .shard = result.settings["mesh"][1]};
  for (const auto& unit : result.settings.at("units")) {
    result.units.push_back(unit.is_array() ? unit.get<std::vector<std::string>>() : std::vector{unit.get<std::string>()});
  }
  return result;
}

}  // namespace

std::optional<at::ScalarType> Case::dtype(const std::string& key) const {
  if (!has(key)) return {};
  static const std::map<std::string, at::ScalarType> kTypes = {
      {"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}};
  return kTypes.at(settings[key]);
}

const std::vector<Case>& cases() {
  static const auto result = [] {
    std::ifstream file(TESSERA_ROOT "/tests/parity" "/cases.json");
    const auto corpus = nlohmann::json::parse(file);
    std::vector<Case> read_cases;
    std::set<std::string> names;
    std::string section;
    for (const auto& settings : corpus.at("cases")) {
      section = settings.value("section", section);
      read_cases.push_back(read(settings, corpus.at("models"), section));
      if (!names.insert(read_cases.back().name).second) throw UsageError("cases.json: two cases are named " + read_cases.back().name);
    }
    return read_cases;
  }();
  return result;
}

}  // namespace tessera::parity
