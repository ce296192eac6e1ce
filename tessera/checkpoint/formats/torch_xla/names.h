// Names in the files of torch_xla's FSDP.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::checkpoint::torch_xla {

constexpr std::string_view kShard = "_fsdp_shard";
constexpr std::string_view kSeparator = "_FSDP_SHARD_SEPARATOR_";  // in place of the dots in a name
constexpr std::string_view kWrapped = "_fsdp_wrapped_module.";     // the wrapper of flat parameters, a member of FSDP's wrapper
constexpr std::string_view kFlattened = "_fpw_module.";            // the module, a member of that wrapper; names in a state dict lack it
constexpr std::string_view kFlatParameter = "flat_param_";
constexpr auto kModel = "model";
constexpr auto kMetadata = "shard_metadata";
constexpr auto kOptimizer = "optimizer";
constexpr auto kExtension = ".pth";

inline std::string replace_all(std::string text, std::string_view from, std::string_view to) {
  for (size_t place = 0; (place = text.find(from, place)) != std::string::npos; place += to.size()) text.replace(place, from.size(), to);
  return text;
}

/// Returns the name of a parameter or a buffer in the model without wrappers.
inline std::string without_wrappers(std::string name) {
  return replace_all(replace_all(std::move(name), kWrapped, ""), kFlattened, "");
}

inline std::string full_name(const std::string& module, const std::string& name) {
  return module.empty() ? name : module + "." + name;
}

}  // namespace tessera::checkpoint::torch_xla
