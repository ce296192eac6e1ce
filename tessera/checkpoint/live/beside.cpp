#include "tessera/checkpoint/live/beside.h"

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/parameters.h"

namespace tessera::checkpoint {
namespace {

std::string stored_name(const std::string& name) {
  return kBesidePrefix + name;
}

void expect_dense(const std::string& name, const at::Tensor& tensor) {
  if (tensor.layout() != at::kStrided || tensor.is_quantized())
    throw UsageError("the tensor '{}' is sparse or quantized; give its parts, such as indices and values, each under its own name",
                     printable(name));
  if (shard_info(tensor)) throw UsageError("the tensor '{}' is a sharded parameter, which is saved with its model", printable(name));
}

void expect_defined(const std::string& name, const at::Tensor& tensor) {
  if (!tensor.defined()) throw UsageError("the tensor '{}' is undefined", printable(name));
}

std::string checksum_of_values(const at::Tensor& tensor) {
  const auto values = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous();
  return checksum_of(std::string_view(static_cast<const char*>(values.const_data_ptr()), values.nbytes()));
}

[[noreturn]] void throw_different(const std::string& what) {
  throw DisagreementError(
      "extra tensors in Contents::tensors must be the same on all ranks, but {}; put tensors that differ by rank into "
      "Contents::tensors_by_rank. Nothing was saved",
      what);
}

}  // namespace

at::Tensor as_rows(const at::Tensor& tensor) {
  return tensor.dim() == 0 ? tensor.unsqueeze(0) : tensor;
}

void expect_savable_beside(const Contents& contents) {
  for (const auto* tensors : {&contents.tensors, &contents.tensors_by_rank}) {
    for (const auto& [name, tensor] : *tensors) {
      if (!is_utf8(name)) throw UsageError("the name '{}' of an extra tensor is not UTF-8", printable(name));
      if (!is_free_name(name)) {
        throw UsageError("an extra tensor can't be called '{}', which is the name of another part of a checkpoint; rename it",
                         printable(name));
      }
      if (contents.notes.contains(name)) throw UsageError("a tensor and a note are both called '{}'", printable(name));
      expect_defined(name, tensor);
      expect_dense(name, tensor);
    }
  }
  for (const auto& [name, tensor] : contents.tensors_by_rank) {
    if (contents.tensors.contains(name))
      throw UsageError("'{}' is in Contents::tensors and in Contents::tensors_by_rank; give it in one of them", printable(name));
  }
}

void expect_loadable_beside(const Contents& contents) {
  for (const auto& [name, tensor] : contents.tensors_by_rank) expect_defined(name, tensor);
  for (const auto* tensors : {&contents.tensors, &contents.tensors_by_rank}) {
    for (const auto& [name, tensor] : *tensors) {
      if (!tensor.defined()) continue;
      expect_dense(name, tensor);
      if (at::has_internal_overlap(tensor) != at::MemOverlap::No)
        throw UsageError("the tensor '{}' is a view in which several values share memory; load into a clone()", name);
    }
  }
}

void expect_same_beside(const Contents& contents, const Communicator& world) {
  std::string lines;
  for (const auto& [name, tensor] : contents.tensors) {
    std::set<std::string> checksums;  // more than one if the ranks of this process have different values
    for (const auto& values : values_of_ranks(tensor, whole_records(tensor.sizes(), world), world))
      checksums.insert(checksum_of_values(values));
    if (checksums.size() > 1) throw_different(fmt::format("'{}' has different values", name));
    lines += fmt::format("'{}'\t{} of [{}] with checksum {}\n", name, c10::toString(tensor.scalar_type()), fmt::join(tensor.sizes(), ", "),
                         *checksums.begin());
  }
  for (const auto& [name, tensor] : contents.tensors_by_rank) {
    const auto rows = as_rows(tensor);
    lines +=
        fmt::format("'{}' by rank\t{} of rows [{}]\n", name, c10::toString(tensor.scalar_type()), fmt::join(rows.sizes().slice(1), ", "));
  }
  const auto found = difference_on_ranks(world, lines, {.unit = "checkpoint"});
  if (!found.empty()) throw_different(found);
}

RowsOfRanks rows_of_ranks(const Contents& contents, const Communicator& world) {
  std::string lines;
  std::vector<int64_t> counts;
  for (const auto& [name, tensor] : contents.tensors) lines += fmt::format("'{}'\tin tensors\n", name);
  for (const auto& [name, tensor] : contents.tensors_by_rank) {
    lines += fmt::format("'{}'\tin tensors_by_rank\n", name);
    counts.push_back(as_rows(tensor).size(0));
  }
  if (const auto found = difference_on_ranks(world, lines, {.unit = "checkpoint"}); !found.empty())
    throw DisagreementError("ranks load different extra tensors: {}. Nothing was changed", found);
  if (counts.empty()) return {};
  const auto own = at::tensor(counts, at::TensorOptions(world.traits().device).dtype(at::kLong));
  const auto whole = at::empty({own.numel() * world.size()}, own.options());
  world.all_gather(std::array{Piece{.whole = whole, .own = own}}, {.unit = "checkpoint"}).wait();
  const auto known = whole.cpu();
  const auto* next = known.const_data_ptr<int64_t>();
  RowsOfRanks rows;
  for (int rank = 0; rank < world.size(); rank++) {
    for (const auto& [name, tensor] : contents.tensors_by_rank) {
      auto& begins = rows[name];
      if (begins.empty()) begins.push_back(0);
      begins.push_back(begins.back() + *next++);
    }
  }
  return rows;
}

void expect_beside(const Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const LoadOptions& options,
                   const std::string& where) {
  std::vector<std::string> troubles;
  const auto expect_fit = [&](const std::string& name, const at::Tensor& tensor, at::IntArrayRef sizes, std::string_view whose) {
    if (!manifest.beside.contains(stored_name(name))) {
      if (!matches(name, options.may_be_missing)) troubles.push_back(fmt::format("'{}' is not in it", name));
      return;
    }
    const auto& there = manifest.catalog.tensors.at(stored_name(name));
    if (!tensor.defined() || (there.dtype == tensor.scalar_type() && at::IntArrayRef(there.shape) == sizes)) return;
    troubles.push_back(fmt::format("'{}'{} is {} of [{}] there, but {} of [{}] here", name, whose, c10::toString(there.dtype),
                                   fmt::join(there.shape, ", "), c10::toString(tensor.scalar_type()), fmt::join(sizes, ", ")));
  };
  for (const auto& [name, tensor] : contents.tensors) expect_fit(name, tensor, tensor.defined() ? tensor.sizes() : at::IntArrayRef(), "");
  for (const auto& [name, tensor] : contents.tensors_by_rank) {
    auto all = as_rows(tensor).sizes().vec();
    all.front() = rows.at(name).back();
    expect_fit(name, tensor, all, " of all ranks");
  }
  if (!troubles.empty()) {
    const auto names = names_beside(manifest);
    throw UsageError("extra tensors do not fit the checkpoint {}: {}; the extra tensors in it are {}", where, joined(troubles, "; "),
                     names.empty() ? "none" : some_of(names));
  }
  for (const auto& name : names_beside(manifest)) {
    if (contents.tensors.contains(name) || contents.tensors_by_rank.contains(name)) continue;
    log(LogLevel::Info, "the extra tensor '{}' in {} is not loaded: Contents does not have it", name, where);
  }
}

void load_beside(Contents& contents, const RowsOfRanks& rows, const Manifest& manifest, const CatalogReader& stored,
                 const Communicator& world) {
  const auto fill = [&](const std::string& name, const at::Tensor& tensor, const std::vector<PartRecord>& records) {
    const auto read = [&](const PartRecord& record, const at::Tensor& flat, int rank) {
      read_part(stored, stored_name(name), record, flat, rank);
    };
    at::Tensor(tensor).copy_(read_for_ranks(tensor, records, tensor.scalar_type(), world, read));
  };
  for (auto& [name, tensor] : contents.tensors) {
    if (!manifest.beside.contains(stored_name(name))) continue;
    const auto& there = stored.info(stored_name(name));
    if (!tensor.defined()) tensor = at::empty(there.shape, at::TensorOptions(at::kCPU).dtype(there.dtype));
    fill(name, tensor, whole_records(there.shape, world));
  }
  for (const auto& [name, tensor] : contents.tensors_by_rank) {
    if (!manifest.beside.contains(stored_name(name))) continue;
    auto records = whole_records(stored.info(stored_name(name)).shape, world);
    for (size_t i = 0; i < records.size(); i++) {
      const auto* const begin = &rows.at(name).at(static_cast<size_t>(world.local_ranks()[i]));
      auto& box = records[i].slices.front();
      box.offsets.front() = begin[0];
      box.sizes.front() = begin[1] - begin[0];
    }
    fill(name, tensor, records);
  }
}

}  // namespace tessera::checkpoint
