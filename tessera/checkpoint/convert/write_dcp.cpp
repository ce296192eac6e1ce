// Writes folders of torch.distributed.checkpoint.
#include <ATen/ATen.h>

#include <algorithm>
#include <iterator>
#include <map>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

namespace {

/// Throws IoError unless rank 0 sees all bytes that the ranks have written, since each rank may see another folder under this name.
void expect_all_there(const fs::path& folder, const std::vector<DcpItem>& items) {
  std::map<std::string, uint64_t> ends;
  for (const auto& item : items) ends[item.file] = std::max(ends[item.file], item.offset + item.bytes);
  for (const auto& [file, end] : ends) {
    const auto bytes = size_of_file(folder / file);
    if (bytes && *bytes >= end) continue;
    throw IoError(
        "{} is written, but rank 0 sees {} of its {} bytes; save where all ranks see the same files and no other job "
        "writes",
        folder / file, bytes.value_or(0), end);
  }
}

/// Writes a rank's boxes if the entry is a tensor of the run. Other entries are written by rank 0.
void write_entry(const RunSource& source, const PythonEntry& entry, int rank, DcpRankWriter& writer) {
  const auto& [path, what] = entry;
  if (const auto* const tensor = std::get_if<SourceTensor>(&what)) {
    for (const auto& box : source.boxes(*tensor, rank)) {
      writer.write(path, box, tensor->dtype, [&](TorchArchiveWriter& archive) {
        source.copy(
            *tensor, box, [&](const TensorSlice&, const at::Tensor& values) { archive.append(values); }, source.file_of(rank));
      });
    }
  }
  if (rank > 0) return;
  if (const auto* const values = std::get_if<at::Tensor>(&what)) writer.write(path, whole_slice(values->sizes()), *values);
  if (const auto* const value = std::get_if<pickle::Value>(&what)) writer.write(path, *value);
}

}  // namespace

void write_dcp_folder(const RunSource& source, const fs::path& folder, c10::function_ref<PythonEntries()> entries) {
  std::map<int, DcpRankWriter> writers;
  source.on_first([&] { make_folder(folder); });
  source.on_each([&] {
    source.expect_seen(folder);
    for (const int rank : source.ranks()) writers.try_emplace(rank, folder, rank);
  });
  std::string words;
  source.on_each([&] {
    for (const auto& entry : entries()) {
      for (auto& [rank, writer] : writers) write_entry(source, entry, rank, writer);
    }
    std::vector<DcpItem> own;
    for (auto& [rank, writer] : writers) std::ranges::move(writer.close(), std::back_inserter(own));
    words = nlohmann::json(own).dump();
  });
  const auto texts = source.texts(words);
  source.on_first([&] {
    std::vector<DcpItem> items;
    for (const auto& text : texts) std::ranges::move(nlohmann::json::parse(text).get<std::vector<DcpItem>>(), std::back_inserter(items));
    expect_all_there(folder, items);
    write_dcp_metadata(folder, items, source.run().save);
  });
}

std::vector<fs::path> write_dcp(const RunSource& source, const fs::path& out) {
  source.in_new_folder(out, [&](const fs::path& unfinished) {
    write_dcp_folder(source, unfinished, [&] {
      auto entries = python_run(source);
      const auto state = source.options().weights_only ? at::Tensor() : generator_of(source, source.ranks().front());
      if (state.defined()) entries.push_back({{kGeneratorName}, state});
      return entries;
    });
  });
  return {out};
}

}  // namespace tessera::checkpoint
