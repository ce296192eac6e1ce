#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/torch/writer.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
namespace xla = torch_xla;
using nlohmann::json;

/// The modules that are wrapped, as far as the names of shards tell.
std::vector<std::string> units_of(const std::vector<TorchXlaShard>& layout) {
  std::set<std::string> units;
  for (const auto& shard : layout) {
    units.insert(xla::without_wrappers(shard.module));
    for (size_t place = 0; (place = shard.module.find(xla::kWrapped, place)) != std::string::npos; place++) {
      auto outer = xla::without_wrappers(shard.module.substr(0, place));
      if (outer.ends_with('.')) outer.pop_back();
      units.insert(std::move(outer));
    }
  }
  return {units.begin(), units.end()};
}

/// What is in the file of one rank: its tree, and its tensors in their order, which are read when they are written.
class Content {
 public:
  Content(int rank, int ranks, const CatalogReader& stored, const std::vector<TorchXlaShard>& layout)
      : rank_(rank), ranks_(ranks), stored_(stored), layout_(layout) {
    TorchTree::Dict all;
    all.entries.emplace_back(xla::kModel, TorchTree{model()});
    all.entries.emplace_back(xla::kMetadata, TorchTree{metadata()});
    if (has_settings()) all.entries.emplace_back(xla::kOptimizer, TorchTree{optimizer()});
    tree_.value = std::move(all);
  }

  const TorchTree& tree() const { return tree_; }
  void write_to(TorchArchiveWriter& archive) const {
    for (const auto& read : tensors_) archive.write(read());
    archive.close();
  }

 private:
  using Names = std::vector<std::string>;

  TorchTree tensor(at::ScalarType dtype, std::vector<int64_t> shape, std::function<at::Tensor()> read) {
    tensors_.push_back(std::move(read));
    return {std::make_shared<TorchTensor>(TorchTensor{.dtype = dtype, .shape = std::move(shape)})};
  }

  TorchTree whole(const std::string& name) {
    const auto& info = stored_.info(name);
    return tensor(info.dtype, info.shape, [this, name] { return stored_.read(name); });
  }

  /// This rank's part of the tensors with these names, which are divided as the shard is.
  TorchTree part(const TorchXlaShard& shard, const Names& names) {
    const auto dtype = stored_.info(names.front()).dtype;
    auto shape = shard.shape;
    if (!shard.on_dim_0) shape = {c10::multiply_integers(shard.shape)};
    const auto multiple = shard.on_dim_0 ? 1 : shard.size_multiple;
    const auto all = ranks_ * multiple;
    shape.front() = (shape.front() + all - 1) / all * multiple;
    return tensor(dtype, shape, [this, &shard, names, dtype, shape] {
      const auto result = at::zeros(shape, at::TensorOptions(at::kCPU).dtype(dtype));
      shard.on_dim_0 ? read_rows(shard, names.front(), result) : read_values(shard, names, result);
      return result;
    });
  }

  void read_rows(const TorchXlaShard& shard, const std::string& name, const at::Tensor& to) const {
    auto box = whole_slice(shard.shape);
    box.offsets.front() = rank_ * to.size(0);
    box.sizes.front() = std::min(to.size(0), shard.shape.front() - box.offsets.front());
    if (box.sizes.front() > 0) stored_.read(name, box, to.narrow(0, 0, box.sizes.front()));
  }

  void read_values(const TorchXlaShard& shard, const Names& names, const at::Tensor& to) const {
    const auto begin = rank_ * to.numel();
    int64_t place = 0;  // where the part begins in the shard
    for (size_t i = 0; i < names.size(); i++) {
      const auto& shape = shard.parts[i].shape;
      const auto numel = c10::multiply_integers(shape);
      const auto first = std::max(begin, place), last = std::min(begin + to.numel(), place + numel);
      if (first < last) {
        const auto slices = slices_of_range(shape, first - place, last - first);
        const auto views = views_of_slices(to.narrow(0, first - begin, last - first), slices, c10::contiguous_strides(shape));
        for (size_t k = 0; k < slices.size(); k++) stored_.read(names[i], slices[k], views[k]);
      }
      place += numel;
    }
  }

  TorchTree::Dict model() {
    TorchTree::Dict result;
    std::set<std::string> divided;
    for (const auto& shard : layout_) {
      Names names;
      for (const auto& each : shard.parts) {
        names.push_back(each.name);
        divided.insert(each.name);
        if (stored_.info(each.name).shape != each.shape) {
          throw UsageError("'{}' has another shape in the checkpoint than in the layout of its shards", each.name);
        }
      }
      result.entries.emplace_back(shard.state_name(), part(shard, names));
    }
    const auto units = units_of(layout_);
    for (const auto& [name, info] : stored_.catalog().tensors) {
      const bool is_state = name.starts_with(kOptimizerPrefix) && !stored_.catalog().buffers.contains(name);
      if (!divided.contains(name) && !is_state) result.entries.emplace_back(xla::name_in_state(name, units), whole(name));
    }
    return result;
  }

  /// torch_xla makes a list of sizes of our list, and a tuple of three lists of our list of these.
  TorchTree::Dict metadata() const {
    TorchTree::Dict info, flat;
    for (const auto& shard : layout_) {
      const auto known = std::ranges::find_if(info.entries, [&](const auto& entry) { return entry.first == TorchTree::Key(shard.module); });
      const auto place = known - info.entries.begin();
      if (known == info.entries.end()) info.entries.emplace_back(shard.module, TorchTree{TorchTree::Dict()});
      std::get<TorchTree::Dict>(info.entries[static_cast<size_t>(place)].second.value)
          .entries.emplace_back(shard.name(), TorchTree{json{{"_orig_size", shard.shape}, {"_orig_name", shard.original_name}}});
      if (!shard.is_flat()) continue;
      auto names = json::array(), shapes = json::array(), numels = json::array();
      for (const auto& each : shard.parts) {
        names.push_back(each.original_name);
        shapes.push_back(each.shape);
        numels.push_back(c10::multiply_integers(each.shape));
      }
      flat.entries.emplace_back(xla::full_name(shard.module, shard.original_name), TorchTree{json::array({names, shapes, numels})});
    }
    return {{{"shard_info", TorchTree{std::move(info)}},
             {"flatten_info", TorchTree{std::move(flat)}},
             {"buffer_info", TorchTree{json::object()}},  // the files have buffers in their original dtype
             {"world_size", TorchTree{json(ranks_)}},
             {"rank", TorchTree{json(rank_)}}}};
  }

  static std::string setting(const std::string& name) { return std::string("optimizer.param_groups.") + name; }

  /// Whether there is one group of parameters, which are those of the layout.
  bool has_settings() const {
    const auto& values = stored_.catalog().values;
    const auto params = values.find(setting("0.params"));
    return params != values.end() && params->second.size() == layout_.size() && !values.contains(setting("1.params"));
  }

  TorchTree::Dict optimizer() {
    TorchTree::Dict state;
    for (size_t i = 0; i < layout_.size(); i++) {
      auto own = state_of(layout_[i]);
      if (!own.entries.empty()) state.entries.emplace_back(static_cast<int64_t>(i), TorchTree{std::move(own)});
    }
    auto group = json::object();
    for (const auto& [name, value] : stored_.catalog().values) {
      if (name.starts_with(setting("0."))) group[name.substr(setting("0.").size())] = value;
    }
    return {{{"state", TorchTree{std::move(state)}}, {"param_groups", TorchTree{json::array({group})}}}};
  }

  TorchTree::Dict state_of(const TorchXlaShard& shard) {
    const auto& catalog = stored_.catalog();
    const auto prefix = [](const TorchXlaShard::Part& each) { return kOptimizerPrefix + each.name + "."; };
    const auto start = prefix(shard.parts.front());
    const auto is_key = [&](const std::string& name) {
      return name.starts_with(start) && name.find('.', start.size()) == std::string::npos;
    };
    TorchTree::Dict result;
    for (auto entry = catalog.tensors.lower_bound(start); entry != catalog.tensors.end() && entry->first.starts_with(start); entry++) {
      if (!is_key(entry->first)) continue;
      const auto key = entry->first.substr(start.size());
      Names names;
      bool is_divided = true;
      for (const auto& each : shard.parts) {
        names.push_back(prefix(each) + key);
        is_divided &= !each.shape.empty() && stored_.info(names.back()).shape == each.shape;
      }
      result.entries.emplace_back(key, is_divided ? part(shard, names) : whole(names.front()));
    }
    for (auto entry = catalog.values.lower_bound(start); entry != catalog.values.end() && entry->first.starts_with(start); entry++) {
      if (is_key(entry->first)) result.entries.emplace_back(entry->first.substr(start.size()), TorchTree{entry->second});
    }
    return result;
  }

  const int rank_, ranks_;
  const CatalogReader& stored_;
  const std::vector<TorchXlaShard>& layout_;
  std::vector<std::function<at::Tensor()>> tensors_;
  TorchTree tree_;
};

}  // namespace

fs::path torch_xla_file(const fs::path& prefix, int rank, int ranks) {
  return fmt::format("{}_rank-{:08}-of-{:08}{}", prefix.string(), rank, ranks, xla::kExtension);
}

TorchXlaRankFile::TorchXlaRankFile(const fs::path& prefix, int rank, int ranks, const CatalogReader& stored,
                                   const std::vector<TorchXlaShard>& layout)
    : file_(torch_xla_file(prefix, rank, ranks)) {
  const Content content(rank, ranks, stored, layout);
  const auto& save = stored.catalog().save;
  TorchArchiveWriter archive(file_, 0, content.tree(), save ? std::optional(save->number) : std::nullopt);
  content.write_to(archive);
}

void expect_no_other_ranks(const fs::path& prefix, int ranks) {
  for (const auto& path : torch_xla_files(prefix)) {
    const auto name = rank_in_name(path.filename().string(), path.extension().string());
    if (!name || name->second == ranks) continue;
    throw UsageError(
        "{} is of a checkpoint of {} ranks, with which files of {} ranks would be mixed up; remove those of its "
        "prefix, or take another prefix",
        path, name->second, ranks);
  }
}

std::vector<fs::path> write_torch_xla(const fs::path& prefix, int ranks, const CatalogReader& stored,
                                      const std::vector<TorchXlaShard>& layout) {
  if (ranks < 1) throw UsageError("files can't be divided over {} ranks", ranks);
  expect_no_other_ranks(prefix, ranks);
  for (const auto& [name, tensor] : stored.catalog().tensors) stored.expect_complete(name);
  for (const auto& bytes : stored.catalog().checksums) stored.verify(bytes);
  std::deque<TorchXlaRankFile> files;
  std::vector<fs::path> result;
  for (int rank = 0; rank < ranks; rank++) {
    files.emplace_back(prefix, rank, ranks, stored, layout);
    result.push_back(torch_xla_file(prefix, rank, ranks));
  }
  try {
    for (auto& file : files) file.commit();
  } catch (...) {  // some have their names, perhaps beside files of an earlier save
    std::error_code ignored;
    for (const auto& path : result) fs::remove(path, ignored);
    throw;
  }
  return result;
}

}  // namespace tessera::checkpoint
