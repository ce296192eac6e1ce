#include "tessera/checkpoint/weights.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/model.h"

namespace tessera::checkpoint {
namespace {

/// A few names of many.
std::string some(const std::vector<std::string>& names) {
  constexpr size_t kMost = 5;
  const std::vector<std::string> first(names.begin(), names.begin() + static_cast<int64_t>(std::min(names.size(), kMost)));
  return fmt::format("{}{}", fmt::join(first, ", "), names.size() > kMost ? fmt::format(" and {} more", names.size() - kMost) : "");
}

void expect_fit(const std::vector<NamedTensor>& own, const SafetensorsFile& file) {
  std::vector<std::string> missing, unknown = file.names();
  for (const auto& entry : own) {
    std::erase(unknown, entry.name);
    if (!file.contains(entry.name)) {
      missing.push_back(entry.name);
    } else if (file.info(entry.name).sizes != entry.tensor.sizes()) {
      throw IoError(fmt::format("{}: '{}' has the shape [{}], in the model it has [{}]", file.path().string(), entry.name,
                                fmt::join(file.info(entry.name).sizes, ", "), fmt::join(entry.tensor.sizes(), ", ")));
    }
  }
  if (missing.empty() && unknown.empty()) return;
  throw IoError(fmt::format("{} is of another model:{}{}", file.path().string(), missing.empty() ? "" : " it lacks " + some(missing),
                            unknown.empty() ? "" : (missing.empty() ? " " : "; ") + std::string("the model has no ") + some(unknown)));
}

}  // namespace

void load_weights(torch::nn::Module& module, const std::filesystem::path& path) {
  const SafetensorsFile file(path);
  const auto own = named_tensors(module);
  expect_fit(own, file);
  const auto whole = full_params(module, Access::Write);
  const c10::AutoGradMode no_grad(false);
  for (const auto& entry : own) entry.tensor.copy_(file.read(entry.name));
}

}  // namespace tessera::checkpoint
