#include "tessera/checkpoint/convert/write_dcp.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

namespace {

/// Throws IoError unless rank 0 sees all bytes that the ranks have written: each rank has written to the folder that it sees.
void expect_all_there(const fs::path& folder, const std::vector<DcpItem>& items) {
  std::map<std::string, uint64_t> ends;
  for (const auto& item : items) ends[item.file] = std::max(ends[item.file], item.offset + item.bytes);
  for (const auto& [file, end] : ends) {
    const auto bytes = size_of_file(folder / file);
    if (bytes && *bytes >= end) continue;
    throw IoError(
        "{} is written, but rank 0 sees {} of its {} bytes; save where all ranks see the same files, and nobody else "
        "writes",
        folder / file, bytes.value_or(0), end);
  }
}

}  // namespace

DcpFolder::DcpFolder(const RunSource& source, const fs::path& folder) : source_(source), folder_(folder) {
  source.on_first([&] { make_folder(folder); });
  source.on_each([&] {
    source.expect_seen(folder);
    for (const int rank : source.ranks()) writers_.try_emplace(rank, folder, rank);
  });
}

void DcpFolder::add(const DcpPath& path, const SourceTensor& tensor) {
  for (auto& [rank, writer] : writers_) {
    for (const auto& box : source_.boxes(tensor, rank)) {
      writer.write(path, box, tensor.dtype, [&, file = source_.file_of(rank)](TorchArchiveWriter& archive) {
        source_.copy(tensor, box, [&](const TensorSlice&, const at::Tensor& values) { archive.append(values); }, file);
      });
    }
  }
}

void DcpFolder::add(const DcpPath& path, const nlohmann::json& value) {
  if (const auto first = writers_.find(0); first != writers_.end()) first->second.write(path, value);
}

void DcpFolder::add(const DcpPath& path, const at::Tensor& tensor) {
  if (const auto first = writers_.find(0); first != writers_.end()) first->second.write(path, whole_slice(tensor.sizes()), tensor);
}

void DcpFolder::add_model() {
  for (const auto& [name, tensor] : named_model(source_)) add({"model", name}, *tensor);
}

void DcpFolder::add_optimizer() {
  for (const auto& tensor : python_state(source_)) add({"optimizer", "state", tensor.parameter, tensor.key}, tensor);
  int64_t number = 0;
  for (const auto& group : source_.settings()) {
    for (const auto& [key, value] : group.items()) add({"optimizer", "param_groups", number, key}, value);
    number++;
  }
}

void DcpFolder::add_beside() {
  for (const auto& tensor : source_.beside()) add({tensor.key}, tensor);
}

void DcpFolder::close() {
  std::vector<DcpItem> own;
  source_.on_each([&] {
    for (auto& [rank, writer] : writers_) std::ranges::move(writer.close(), std::back_inserter(own));
  });
  std::string words;
  source_.on_each([&] { words = nlohmann::json(own).dump(); });
  const auto texts = source_.texts(words);
  source_.on_first([&] {
    std::vector<DcpItem> items;
    for (const auto& text : texts) std::ranges::move(nlohmann::json::parse(text).get<std::vector<DcpItem>>(), std::back_inserter(items));
    expect_all_there(folder_, items);
    write_dcp_metadata(folder_, items, source_.run().save);
  });
}

std::vector<fs::path> write_dcp(const RunSource& source, const fs::path& out) {
  source.in_new_folder(out, [&](const fs::path& unfinished) {
    DcpFolder folder(source, unfinished);
    source.on_each([&] {
      folder.add_model();
      if (!source.run().optimizer.empty()) folder.add_optimizer();
      if (source.options().weights_only) return;
      folder.add_beside();
      for (const auto& [name, value] : values_of_notes(source)) folder.add({name}, value);
      if (const auto state = generator_of(source, source.ranks().front()); state.defined()) folder.add({kGeneratorName}, state);
    });
    folder.close();
  });
  return {out};
}

}  // namespace tessera::checkpoint
