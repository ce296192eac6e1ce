// Reads from shard_info and flatten_info how the parameters in rank files are divided.
#include <fmt/format.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/formats/torch_xla/rank.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/stored/catalog.h"

namespace tessera::checkpoint {
namespace {

namespace xla = torch_xla;
using pickle::Dict;
using pickle::Value;

class LayoutReader {
 public:
  explicit LayoutReader(const xla::RankContent& file) : file_(file) {}

  std::vector<TorchXlaShard> read() const {
    std::vector<TorchXlaShard> shards;
    for (const auto& [module, own] : file_.dict(file_.metadata(), "shard_info").entries()) {
      const auto name = to_name(module);
      if (!name || own.as<Dict>() == nullptr) file_.fail("has a shard_info that is not a dict of dicts by module names");
      for (const auto& [key, place] : own.entries()) shards.push_back(shard(*name, key, place));
    }
    return shards;
  }

 private:
  TorchXlaShard shard(const std::string& module, const Value& key, const Value& place) const {
    const auto* const original = place["_orig_name"].as<std::string>();
    const auto name = to_name(key);
    const auto shape = to_integers(place["_orig_size"]);
    if (!name || original == nullptr || !shape || !checked_numel(*shape, kWidest))
      file_.fail("has a shard_info that does not say name and size of '{}'", name.value_or(""));
    TorchXlaShard result{.module = module, .original_name = *original, .shape = *shape};
    if (result.name() != *name)
      file_.fail("has a shard_info in which the original name of '{}' is said to be '{}'", *name, result.original_name);
    const auto full = xla::full_name(module, result.original_name);
    if (full.find(std::string(xla::kWrapped) + std::string(xla::kFlatParameter)) == std::string::npos) {
      result.parts = {{.name = xla::without_wrappers(full), .original_name = result.original_name, .shape = *shape}};
    } else {
      result.parts = parts(full, *checked_numel(*shape));
    }
    return result;
  }

  /// Returns the parts of a flat parameter. flatten_info describes them as (names, shapes, numbers of values).
  std::vector<TorchXlaShard::Part> parts(const std::string& flat, int64_t numel) const {
    const auto json = to_json(file_.dict(file_.metadata(), "flatten_info")[flat]);
    const auto refuse = [&] { file_.fail("has a flatten_info that does not fit '{}'", flat); };
    if (!json || !json->is_array() || json->size() != 3) refuse();
    std::vector<TorchXlaShard::Part> result;
    try {
      const auto names = json->at(0).get<std::vector<std::string>>();
      const auto shapes = json->at(1).get<std::vector<std::vector<int64_t>>>();
      const auto numels = json->at(2).get<std::vector<int64_t>>();
      if (shapes.size() != names.size() || numels.size() != names.size()) refuse();
      for (size_t i = 0; i < names.size(); i++) {
        const auto own = checked_numel(shapes[i], kWidest);
        if (!own || *own / kWidest != numels[i] || numels[i] > numel) refuse();
        numel -= numels[i];
        const auto dot = flat.rfind('.');
        const auto wrapper = dot == std::string::npos ? "" : flat.substr(0, dot);
        result.push_back({.name = xla::without_wrappers(xla::full_name(wrapper, names[i])), .original_name = names[i], .shape = shapes[i]});
      }
    } catch (const nlohmann::json::exception&) {
      refuse();
    }
    if (numel != 0 || result.empty()) refuse();
    return result;
  }

  static constexpr int64_t kWidest = 16;  // most bytes in a value: sizes of tensors in bytes must not overflow
  const xla::RankContent& file_;
};

}  // namespace

std::vector<TorchXlaShard> torch_xla::layout_of(const RankContent& file) {
  return LayoutReader(file).read();
}

std::string TorchXlaShard::name() const {
  return xla::replace_all(fmt::format("{}.{}", xla::kShard, original_name), ".", xla::kSeparator);
}

std::string TorchXlaShard::state_name() const {
  return xla::full_name(module, name());
}

}  // namespace tessera::checkpoint
