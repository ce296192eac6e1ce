#include "case.h"

#include <fstream>
#include <set>

#include "tessera/base/error.h"

namespace tessera::parity {
namespace {

/// Everything that a case can say; a word that nobody reads is an error.
const std::set<std::string> kWords = {
    "section", "name",     "model",     "ranks",  "mesh",     "units",        "strategy",     "reshard_after_forward", "param_dtype", "reduce_dtype",
    "frozen",  "gathers",  "unused",    "scale",  "passes",   "output_dtype", "buffer_dtype", "accumulate",            "divide",      "clip_norm",
    "layout",  "prefetch", "shard_dim", "within", "ignored",  "replicated",   "clip_value",   "optimizer",             "in_backward", "remark"};

Case read(const nlohmann::json& settings, const nlohmann::json& models, const std::string& section) {
  for (const auto& [word, value] : settings.items()) {
    if (!kWords.contains(word)) throw UsageError("cases.json: '" + word + "' means nothing, in " + settings.dump());
  }
  Case result{.section = section, .name = settings.at("name"), .model = settings.at("model"), .ranks = settings.at("ranks"), .settings = settings};
  result.mesh = {.replicate = 1, .shard = result.ranks};
  if (result.has("mesh")) result.mesh = {.replicate = settings["mesh"][0], .shard = settings["mesh"][1]};
  for (const auto& unit : result.get("units", models.at(result.model))) {
    result.units.push_back(unit.is_array() ? unit.get<std::vector<std::string>>() : std::vector{unit.get<std::string>()});
  }
  return result;
}

}  // namespace

std::optional<at::ScalarType> Case::dtype(const std::string& key) const {
  if (!has(key)) return {};
  static const std::map<std::string, at::ScalarType> kTypes = {{"float32", at::kFloat}, {"float16", at::kHalf}, {"bfloat16", at::kBFloat16}};
  return kTypes.at(settings[key]);
}

const std::vector<Case>& cases() {
  static const auto result = [] {
    std::ifstream file(TESSERA_PARITY_FOLDER "/cases.json");
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
