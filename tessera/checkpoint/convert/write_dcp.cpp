#include "tessera/checkpoint/convert/write_dcp.h"

#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/atomic_write.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/python_run.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {

namespace fs = std::filesystem;

DcpFolder::DcpFolder(const RunSource& source, const fs::path& folder) : source_(source), folder_(folder) {
  make_folder(folder);
  for (int rank = 0; rank < source.options().world; rank++) writers_.push_back(std::make_unique<DcpRankWriter>(folder, rank));
}

/// Rows as FSDP divides them.
void DcpFolder::add(const DcpPath& path, const SourceTensor& tensor) {
  const auto ranks = std::ssize(writers_);
  const auto rows = tensor.shape.empty() ? 1 : tensor.shape.front();
  const auto each = std::max<int64_t>((rows + ranks - 1) / ranks, 1);
  for (int64_t rank = 0; rank < ranks && (rank == 0 || rank * each < rows); rank++) {
    auto box = whole_slice(tensor.shape);
    if (!tensor.shape.empty()) {
      box.offsets.front() = rank * each;
      box.sizes.front() = std::min(each, rows - rank * each);
    }
    auto& writer = *writers_[static_cast<size_t>(rank)];
    source_.copy(tensor, box, [&](const TensorSlice& piece, const at::Tensor& values) { writer.write(path, piece, values); });
  }
}

void DcpFolder::add(const DcpPath& path, const at::Tensor& tensor) {
  writers_.front()->write(path, whole_slice(tensor.sizes()), tensor);
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
  std::vector<DcpItem> items;
  for (const auto& writer : writers_) std::ranges::move(writer->close(), std::back_inserter(items));
  write_dcp_metadata(folder_, items);
}

std::vector<fs::path> write_dcp(const RunSource& source, const fs::path& out) {
  NewFolder made(out);
  DcpFolder folder(source, unfinished_path(out));
  folder.add_model();
  if (!source.run().optimizer.empty()) folder.add_optimizer();
  if (!source.options().weights_only) {
    folder.add_beside();
    for (const auto& [name, value] : values_of_notes(source)) folder.add({name}, value);
    if (const auto state = generator_of(source, 0); state.defined()) folder.add({kGeneratorName}, state);
  }
  folder.close();
  made.commit();
  return {out};
}

}  // namespace tessera::checkpoint
