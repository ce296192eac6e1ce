// Rank files of torch_xla's FSDP, of a model that is wrapped as a whole.
#pragma once

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <filesystem>
#include <map>
#include <memory>
#include <string>

#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::testing {

inline std::filesystem::path torch_xla_file(const std::filesystem::path& prefix, int rank, int ranks) {
  return prefix.string() + fmt::format("_rank-{:08}-of-{:08}.pth", rank, ranks);
}

/// How parameters are divided among the ranks: by their values, after joining them in one flat parameter, or by their rows.
enum class TorchXlaWay { Values, Flat, Rows };

/// Writes the files of all ranks. The state of their optimizer has the parameters' own values as `exp_avg`.
inline void write_torch_xla(const std::filesystem::path& prefix, int ranks, std::map<std::string, at::Tensor> parameters,
                            TorchXlaWay way = TorchXlaWay::Values) {
  using checkpoint::from_json;
  namespace pickle = checkpoint::pickle;
  nlohmann::json flatten_info = nlohmann::json::object();
  if (way == TorchXlaWay::Flat) {
    nlohmann::json names, shapes, numels;
    std::vector<at::Tensor> values;
    for (const auto& [name, whole] : parameters) {
      names.push_back("_fpw_module." + name);
      shapes.push_back(whole.sizes().vec());
      numels.push_back(whole.numel());
      values.push_back(whole.flatten());
    }
    flatten_info["_fsdp_wrapped_module.flat_param_0"] = {names, shapes, numels};
    parameters = {{"flat_param_0", at::cat(values)}};
  }
  constexpr int64_t kMultiple = 128;  // the number of values of a rank is a multiple of this
  for (int rank = 0; rank < ranks; rank++) {
    pickle::Dict model, state;
    nlohmann::json shards, numbers = nlohmann::json::array();
    std::vector<at::Tensor> parts;
    for (const auto& [name, whole] : parameters) {
      const auto original = "_fsdp_wrapped_module." + name;
      std::string key = "_fsdp_shard." + original;
      for (size_t dot = 0; (dot = key.find('.', dot)) != std::string::npos;) key.replace(dot, 1, "_FSDP_SHARD_SEPARATOR_");
      const auto multiple = ranks * (way == TorchXlaWay::Rows ? 1 : kMultiple);
      const auto values = way == TorchXlaWay::Rows ? whole : whole.flatten();
      const auto padded = (values.size(0) + multiple - 1) / multiple * multiple, own = padded / ranks;
      auto more = values.sizes().vec();
      more.front() = padded - values.size(0);
      parts.push_back(at::cat({values, at::zeros(more, values.options())}).slice(0, own * rank, own * (rank + 1)).contiguous());
      const pickle::Tensor tensor{.dtype = whole.scalar_type(), .shape = parts.back().sizes().vec()};
      model.entries.emplace_back(key, tensor);
      state.entries.emplace_back(static_cast<int64_t>(numbers.size()), pickle::Dict{{{"exp_avg", tensor}}});
      shards[key] = {{"_orig_size", whole.sizes().vec()}, {"_orig_name", original}};
      numbers.push_back(numbers.size());
    }
    const nlohmann::json metadata = {{"shard_info", {{"", shards}}},
                                     {"flatten_info", flatten_info},
                                     {"buffer_info", nlohmann::json::object()},
                                     {"world_size", ranks},
                                     {"rank", rank}};
    const nlohmann::json group = {{"lr", 0.5}, {"params", numbers}};
    const pickle::Dict optimizer{{{"state", state}, {"param_groups", pickle::List{{from_json(group)}}}}};
    checkpoint::TorchFileWriter writer(torch_xla_file(prefix, rank, ranks),
                                       pickle::Dict{{{"model", model}, {"shard_metadata", from_json(metadata)}, {"optimizer", optimizer}}});
    for (int copies = 0; copies < 2; copies++) {
      for (const auto& part : parts) writer.write(part);
    }
    writer.close();
  }
}

}  // namespace tessera::testing
