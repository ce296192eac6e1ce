// Writes files of torch.save.
#include <algorithm>
#include <map>
#include <memory>
#include <span>

#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/fill.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/formats/torch/file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

namespace {

/// Returns entries that have the first `depth` keys in common as dicts and lists, nested by the other keys. `leaf` makes the value of an
/// entry.
pickle::Value nested(std::span<const PythonEntry> entries, size_t depth, c10::function_ref<pickle::Value(const PythonEntry&)> leaf) {
  pickle::List list;
  pickle::Dict dict;
  while (!entries.empty()) {
    const auto& path = entries.front().path;
    const bool is_leaf = path.size() == depth + 1;
    const auto end = std::ranges::find_if(
        entries, [&](const PythonEntry& entry) { return entry.path.size() < depth + 2 || entry.path[depth] != path[depth]; });
    const auto count = is_leaf ? 1 : static_cast<size_t>(end - entries.begin());
    auto value = is_leaf ? leaf(entries.front()) : nested(entries.first(count), depth + 1, leaf);
    if (depth == 2 && path[1] == DcpPath::value_type("param_groups")) {
      list.items.push_back(std::move(value));
    } else {
      dict.entries.emplace_back(std::visit([](const auto& key) { return pickle::Value(key); }, path[depth]), std::move(value));
    }
    entries = entries.subspan(count);
  }
  if (list.items.empty()) return dict;
  return list;
}

}  // namespace

void write_torch_file(const RunSource& source, const fs::path& path, const PythonEntries& entries, size_t depth,
                      std::optional<uint64_t> save) {
  std::vector<SourceTensor> tensors;           // in the order of the file
  std::map<std::string, pickle::Value> known;  // by name, so that a tied tensor is written once
  const auto content = nested(entries, depth, [&](const PythonEntry& entry) -> pickle::Value {
    if (const auto* const value = std::get_if<pickle::Value>(&entry.what)) return *value;
    const auto* const tensor = std::get_if<SourceTensor>(&entry.what);
    if (tensor == nullptr) return pickle::Dict{};
    const auto [place, is_new] = known.try_emplace(tensor->name);
    if (is_new) {
      place->second = pickle::Tensor{.dtype = tensor->dtype, .shape = tensor->shape};
      tensors.push_back(*tensor);
    }
    return place->second;
  });
  write_reserved(source, tensors, DigestKind::Crc32, [&] {
    make_folder(path.parent_path());
    return std::make_unique<TorchFileWriter>(path, content, save);
  });
}

std::vector<fs::path> write_torch(const RunSource& source, const fs::path& out) {
  const auto& key = source.options().model_key;  // only set together with weights_only
  auto entries = python_run(source);
  if (!key.empty()) {
    for (auto& entry : entries) entry.path.front() = key;
  }
  write_torch_file(source, out, entries, source.options().weights_only && key.empty() ? 1 : 0);
  return {out};
}

}  // namespace tessera::checkpoint
