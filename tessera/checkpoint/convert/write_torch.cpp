#include "tessera/checkpoint/convert/write_torch.h"

#include <ATen/ATen.h>

#include <map>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/fill.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

TorchTree TreeFile::model() {
  TorchTree::Dict dict;
  std::map<std::string, TorchTree::Tensor> first;
  for (const auto& [name, tensor] : named_model(source_)) {
    auto& place = first[tensor->name];
    if (place == nullptr) place = add(*tensor);
    dict.entries.emplace_back(name, TorchTree{place});
  }
  return {std::move(dict)};
}

TorchTree TreeFile::optimizer() {
  TorchTree::Dict state;
  for (const auto& tensor : python_state(source_)) {
    if (state.entries.empty() || state.entries.back().first != TorchTree::Key(tensor.parameter))
      state.entries.emplace_back(tensor.parameter, TorchTree{TorchTree::Dict{}});
    std::get<TorchTree::Dict>(state.entries.back().second.value).entries.emplace_back(tensor.key, TorchTree{add(tensor)});
  }
  return {TorchTree::Dict{{{"state", TorchTree{std::move(state)}}, {"param_groups", TorchTree{source_.settings()}}}}};
}

TorchTree TreeFile::numbered_optimizer() {
  if (!source_.notes().contains(kSettingsNote))
    throw UsageError(
        "without FSDP, Accelerate knows the optimizer's parameters by numbers, and this checkpoint does not say in which order the "
        "optimizer "
        "has them; save with checkpoint::save in this format, or convert the weights only (.weights_only = true)");
  auto groups = source_.settings();
  std::map<std::string, int64_t> numbers;
  for (auto& group : groups) {
    group["param_names"] = group["params"];
    for (auto& param : group["params"]) {
      const auto number = std::ssize(numbers);
      numbers.emplace(param.get<std::string>(), number);
      param = number;
    }
  }
  auto tree = optimizer();
  auto& entries = std::get<TorchTree::Dict>(tree.value).entries;
  for (auto& [parameter, state] : std::get<TorchTree::Dict>(entries[0].second.value).entries) {
    const auto number = numbers.find(std::get<std::string>(parameter));
    if (number == numbers.end()) {
      throw UsageError("no group of the optimizer has '{}', of which there is state, so it has no number; convert to a layout of FSDP",
                       std::get<std::string>(parameter));
    }
    parameter = number->second;
  }
  entries[1].second = TorchTree{std::move(groups)};
  return tree;
}

void TreeFile::write(const fs::path& path, const TorchTree& tree, std::optional<uint64_t> save) {
  write_reserved(source_, tensors_, DigestKind::Crc32, [&] {
    make_folder(path.parent_path());
    return std::make_unique<TorchFileWriter>(path, tree, save);
  });
}

TorchTree::Tensor TreeFile::add(const SourceTensor& tensor) {
  tensors_.push_back(tensor);
  return std::make_shared<TorchTensor>(TorchTensor{.dtype = tensor.dtype, .shape = tensor.shape});
}

std::vector<fs::path> write_torch(const RunSource& source, const fs::path& out) {
  TreeFile file(source);
  auto model = file.model();
  if (source.options().weights_only) {
    const auto& key = source.options().model_key;
    file.write(out, key.empty() ? model : TorchTree{TorchTree::Dict{{{key, model}}}});
    return {out};
  }
  TorchTree::Dict all{{{"model", std::move(model)}}};
  if (!source.run().optimizer.empty()) all.entries.emplace_back("optimizer", file.optimizer());
  for (const auto& tensor : source.beside()) all.entries.emplace_back(tensor.key, file.tensor(tensor));
  for (const auto& [name, value] : values_of_notes(source)) all.entries.emplace_back(name, TorchTree{value});
  file.write(out, {std::move(all)});
  return {out};
}

}  // namespace tessera::checkpoint
