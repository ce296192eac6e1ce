#include "tessera/checkpoint/convert/write_torch.h"

#include <ATen/ATen.h>

#include "tessera/checkpoint/convert/python_run.h"

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

void TreeFile::write(const fs::path& path, const TorchTree& tree) {
  TorchFileWriter writer(path, tree);
  for (const auto& tensor : tensors_) source_.copy(tensor, [&](const at::Tensor& values) { writer.append(values); });
  writer.close();
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
  for (const auto& [name, value] : values_of_notes(source)) all.entries.emplace_back(name, TorchTree{value});
  file.write(out, {std::move(all)});
  return {out};
}

}  // namespace tessera::checkpoint
