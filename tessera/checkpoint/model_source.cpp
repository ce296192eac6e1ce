#include "tessera/checkpoint/model_source.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/catalogs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Also if it is the same path.
bool is_inside(const fs::path& path, const fs::path& folder) {
  std::error_code unknown;  // what can't be found out is no reason to refuse
  const auto inner = fs::weakly_canonical(path, unknown), outer = fs::weakly_canonical(folder, unknown);
  return !unknown && std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

}  // namespace

ModelSource::ModelSource(const fs::path& checkpoint, const fs::path& out, std::optional<at::ScalarType> dtype, MergeProgress progress)
    : stored_(read_model(checkpoint)), progress_(std::move(progress)) {
  const auto is_out = [&](const fs::path& file) { return is_inside(out, file); };
  if (is_inside(out, checkpoint) || std::ranges::any_of(catalog().files, is_out)) {
    throw UsageError(
        fmt::format("{} lies in the checkpoint {}, whose files it could replace; write elsewhere", out.string(), checkpoint.string()));
  }
  for (const auto& [name, tensor] : catalog().tensors) {
    stored_.expect_complete(name);
    const bool rounds = dtype && at::isFloatingType(tensor.dtype);
    entries_.push_back({.name = name, .dtype = rounds ? *dtype : tensor.dtype, .sizes = tensor.shape});
    all_ += entries_.back().bytes();
  }
  if (entries_.empty()) throw IoError(fmt::format("{} has no tensors of a model", checkpoint.string()));
  for (const auto& bytes : catalog().checksums) stored_.verify(bytes);
}

void ModelSource::sort_by_width() {
  std::ranges::stable_sort(entries_, std::greater{}, [](const SafetensorsEntry& entry) { return c10::elementSize(entry.dtype); });
}

std::map<std::string, std::string> ModelSource::metadata() const {
  auto result = catalog().aliases;
  result["format"] = "pt";
  return result;
}

TorchTree ModelSource::tree() const {
  TorchTree::Dict dict;
  std::map<std::string, TorchTree::Tensor> tensors;
  for (const auto& entry : entries_) {
    tensors[entry.name] = std::make_shared<TorchTensor>(TorchTensor{.dtype = entry.dtype, .shape = entry.sizes});
    dict.entries.emplace_back(entry.name, TorchTree{tensors[entry.name]});
  }
  for (const auto& [alias, name] : catalog().aliases) {
    if (tensors.contains(name)) dict.entries.emplace_back(alias, TorchTree{tensors[name]});
  }
  return {std::move(dict)};
}

}  // namespace tessera::checkpoint
