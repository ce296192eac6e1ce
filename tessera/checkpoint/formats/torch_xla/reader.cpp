// Reads the rank files of all ranks as one catalog.
#include <c10/util/strides.h>
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/formats/torch_xla/names.h"
#include "tessera/checkpoint/formats/torch_xla/rank.h"
#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
namespace xla = torch_xla;
using pickle::Dict;
using pickle::Value;

/// Joins the files of all ranks.
class TorchXlaReader {
 public:
  explicit TorchXlaReader(std::vector<xla::RankContent> files) : files_(std::move(files)), layout_(xla::layout_of(files_.front())) {
    for (const auto& file : files_) catalog_.files.push_back(file.path());
  }

  Catalog take(TorchXlaContent content) {
    for (const auto& shard : layout_) add_shard(shard);
    for (const auto& file : files_) expect_no_other_shards(file);
    add_buffers();
    if (content == TorchXlaContent::All) add_others();
    return std::move(catalog_);
  }

 private:
  using Names = std::vector<std::string>;

  const xla::RankContent& first() const { return files_.front(); }

  /// The shard's tensor in each rank's file.
  std::vector<ArchivedTensor> parts_of(const TorchXlaShard& shard) const {
    std::vector<ArchivedTensor> result;
    for (const auto& file : files_) result.push_back(file.tensor(shard.state_name()));
    return result;
  }

  void add_shard(const TorchXlaShard& shard) {
    Names names;
    for (const auto& part : shard.parts) names.push_back(part.name);
    add(shard, names, parts_of(shard));
  }

  /// Adds tensors that are divided as the shard is. `names` are the names of the tensors, one for each part of the shard; `parts` has each
  /// rank's values.
  void add(const TorchXlaShard& shard, const Names& names, const std::vector<ArchivedTensor>& parts) {
    const auto& one = parts.front();
    const auto place = std::tuple(one.storage.begin, one.begin, one.dtype, one.shape);
    if (const auto [known, is_new] = places_.try_emplace(place, names); !is_new && known->second.size() == names.size()) {
      for (size_t i = 0; i < names.size(); i++) {  // a module that the model has in two places
        if (names[i] != known->second[i]) catalog_.aliases.emplace(names[i], known->second[i]);
      }
      return;
    }
    std::vector<StoredTensor> made;
    for (const auto& part : shard.parts) made.push_back({.dtype = one.dtype, .shape = part.shape});
    int64_t begin = 0;  // index of the rank's first value or row among those of all ranks
    for (size_t rank = 0; rank < parts.size(); rank++) {
      const auto& part = parts[rank];
      const auto refuse = [&] {
        files_[rank].fail("has a part [{}] of '{}', which does not fit its size [{}] in shard_info or the parts of other ranks",
                          joined(part.shape), names.front(), joined(shard.shape));
      };
      const bool fits = part.dtype == one.dtype && part.shape.size() == one.shape.size() && !part.shape.empty();
      if (!fits || (part.shape.size() > 1 && !add_rows(made.front(), shard, part, begin, rank))) refuse();
      if (part.shape.size() == 1 && part.shape.front() > 1 && part.strides.front() != 1) refuse();
      if (part.shape.size() == 1) add_values(made, part, begin, rank);
      if (__builtin_add_overflow(begin, part.shape.front(), &begin)) refuse();
    }
    const auto needed = one.shape.size() > 1 ? shard.shape.front() : *checked_numel(shard.shape);
    if (begin < needed) {
      first().fail("says in its shard_info that '{}' has the size [{}], but all ranks together have only {} of {}", names.front(),
                   joined(shard.shape), begin, needed);
    }
    for (size_t i = 0; i < names.size(); i++) add_tensor(names[i], std::move(made[i]));
    for (size_t rank = 0; rank < parts.size(); rank++) add_checksum(rank, parts[rank], names.front());
  }

  /// Adds whole rows of a tensor that is not flat. Returns false if they do not fit.
  static bool add_rows(StoredTensor& tensor, const TorchXlaShard& shard, const ArchivedTensor& part, int64_t begin, size_t rank) {
    const bool fits =
        part.shape.size() == shard.shape.size() && std::equal(part.shape.begin() + 1, part.shape.end(), shard.shape.begin() + 1);
    if (!fits || shard.is_flat()) return false;
    auto box = whole_slice(shard.shape);
    box.offsets.front() = begin;
    box.sizes.front() = std::min(part.shape.front(), shard.shape.front() - begin);
    if (box.sizes.front() > 0) tensor.boxes.push_back(part.stored_in(rank, box));
    return true;
  }

  /// Adds a rank's values of tensors that lie one after the other, each in row-major order.
  static void add_values(std::vector<StoredTensor>& tensors, const ArchivedTensor& part, int64_t begin, size_t rank) {
    const auto width = static_cast<int64_t>(c10::elementSize(part.dtype));
    const auto end = part.shape.front() > INT64_MAX - begin ? INT64_MAX : begin + part.shape.front();
    int64_t place = 0;  // the number of values of all earlier tensors
    for (auto& tensor : tensors) {
      const auto numel = *checked_numel(tensor.shape);
      const auto from = std::max(begin, place), to = std::min(end, place + numel);
      const auto strides = c10::contiguous_strides(tensor.shape);
      if (from < to) {
        auto offset = part.begin + static_cast<uint64_t>((from - begin) * width);
        for (auto& box : slices_of_range(tensor.shape, from - place, to - from)) {
          const auto bytes = static_cast<uint64_t>(box.numel() * width);
          tensor.boxes.push_back({.box = std::move(box), .file = rank, .offset = offset, .strides = {strides.begin(), strides.end()}});
          offset += bytes;
        }
      }
      place += numel;
    }
  }

  void add_tensor(const std::string& name, StoredTensor tensor) {
    if (!catalog_.tensors.emplace(name, std::move(tensor)).second) first().fail("has two tensors that are '{}' in the model", name);
  }

  void add_checksum(size_t rank, const ArchivedTensor& tensor, const std::string& name) {
    if (storages_.emplace(rank, tensor.storage.begin).second) tensor.add_checksum(catalog_, rank, name);
  }

  void expect_no_other_shards(const xla::RankContent& file) {
    if (known_.empty()) {
      for (const auto& shard : layout_) known_.insert(shard.state_name());
    }
    for (const auto& name : file.names()) {
      if (xla::is_of_shard(name) && !known_.contains(name)) file.fail("has '{}', which rank 0's shard_info does not know", name);
    }
  }

  void add_whole(const std::string& name, const ArchivedTensor& tensor, std::optional<at::ScalarType> dtype = {}) {
    StoredTensor stored{.dtype = dtype.value_or(tensor.dtype), .shape = tensor.shape, .boxes = {tensor.stored_in(0)}};
    if (stored.dtype != tensor.dtype) stored.rounded = tensor.dtype;
    add_tensor(name, std::move(stored));
    add_checksum(0, tensor, name);
  }

  /// Adds tensors that are not divided, from rank 0. Names in buffer_info may contain a wrapper's name, which names in the state dict lack.
  void add_buffers() {
    std::map<std::string, at::ScalarType> dtypes;
    for (const auto& [key, value] : first().metadata()["buffer_info"].entries()) {
      const auto name = to_name(key);
      const auto dtype = to_dtype(value["_orig_dtype"]);
      if (!name || !dtype) first().fail("has a buffer_info without a name or a dtype");
      dtypes[xla::without_wrappers(*name)] = *dtype;
    }
    for (const auto& stored : first().names()) {
      if (xla::is_of_shard(stored)) continue;
      const auto tensor = first().archive().tensor(*first().value(stored), stored);
      if (!tensor) continue;
      const auto name = xla::without_wrappers(stored);
      const auto dtype = dtypes.find(name);
      add_whole(name, *tensor, dtype == dtypes.end() ? std::nullopt : std::optional(dtype->second));
      catalog_.buffers.insert(name);
    }
  }

  void add_others() {
    catalog_.values["shard_metadata.world_size"] = files_.size();
    for (const auto& [key, value] : first().content().entries()) {
      const auto name = to_name(key);
      if (!name || name == xla::kModel || name == xla::kMetadata || name == xla::kOptimizer) continue;
      if (auto json = to_json(value)) catalog_.values[*name] = std::move(*json);
    }
    if (first().content()[xla::kOptimizer].is_none()) return;
    add_settings();
    if (const auto why = why_no_state()) {
      log(LogLevel::Warning, "the optimizer's state in {} is left out: {}", first().path(), *why);
      return;
    }
    for (size_t i = 0; i < layout_.size(); i++) add_state(i);
  }

  void add_settings() {
    const auto json = to_json(first().dict(first().content(), xla::kOptimizer)["param_groups"]);
    if (!json || !json->is_array()) return;
    for (size_t i = 0; i < json->size(); i++) {
      groups_.push_back(json->at(i));
      if (!json->at(i).is_object()) continue;
      for (const auto& [key, value] : json->at(i).items()) catalog_.values[fmt::format("optimizer.param_groups.{}.{}", i, key)] = value;
    }
  }

  /// Returns why the optimizer's state can't be used, or nothing if it can. The state identifies parameters by numbers, which are in the
  /// model's order only if all parameters are in one group.
  std::optional<std::string> why_no_state() const {
    if (groups_.size() != 1)
      return fmt::format("it has {} groups of parameters, and the files don't say which parameter is in which group", groups_.size());
    auto order = nlohmann::json::array();
    for (size_t i = 0; i < layout_.size(); i++) order.push_back(i);
    if (!groups_.front().is_object() || groups_.front().value("params", nlohmann::json()) != order) {
      return fmt::format("its parameters are not the {} of the model, and the files don't say which they are", layout_.size());
    }
    for (const auto& file : files_) {
      if (file.dict(file.content(), xla::kOptimizer)["state"].as<Dict>() == nullptr) return file.path().string() + " has no state";
    }
    return {};
  }

  /// Returns the state of a parameter on each rank; empty if the parameter has none.
  std::vector<Value> states(size_t parameter) const {
    std::vector<Value> result;
    for (const auto& file : files_) {
      const auto& state = file.dict(file.content()[xla::kOptimizer], "state").entries();
      const auto found = std::ranges::find_if(state, [&](const auto& entry) {
        const auto* const number = entry.first.template as<int64_t>();
        return number != nullptr && *number == static_cast<int64_t>(parameter);
      });
      if (found == state.end() || found->second.as<Dict>() == nullptr) return {};  // the parameter has never had a gradient
      result.push_back(found->second);
    }
    return result;
  }

  void add_state(size_t parameter) {
    const auto& shard = layout_[parameter];
    const auto own = parts_of(shard);
    const auto all = states(parameter);
    if (all.empty() || catalog_.aliases.contains(shard.parts.front().name)) return;
    for (const auto& [key, value] : all.front().entries()) {
      const auto text = to_name(key);
      if (!text) continue;
      Names names;
      for (const auto& part : shard.parts) names.push_back(fmt::format("{}{}.{}", kOptimizerPrefix, part.name, *text));
      std::vector<ArchivedTensor> parts;
      for (size_t rank = 0; rank < files_.size(); rank++) {
        if (const auto tensor = files_[rank].archive().tensor(all[rank][*text], names.front())) parts.push_back(*tensor);
      }
      const bool is_divided =
          parts.size() == files_.size() && std::ranges::equal(parts, own, {}, &ArchivedTensor::shape, &ArchivedTensor::shape);
      if (is_divided) {
        add(shard, names, parts);
      } else if (!parts.empty() && checked_numel(parts.front().shape) == 1) {  // such as a number of steps
        for (const auto& name : names) add_whole(name, parts.front());
      } else if (auto json = parts.empty() ? to_json(value) : std::nullopt) {
        for (const auto& name : names) catalog_.values[name] = *json;
      } else {
        log(LogLevel::Warning,
            fmt::format("'{}' in {} is left out: it is not divided like its parameter", names.front(), first().path().string()));
      }
    }
  }

  const std::vector<xla::RankContent> files_;
  std::vector<TorchXlaShard> layout_;
  Catalog catalog_;
  std::set<std::string> known_;  // the names of the layout's shards in state dicts
  std::set<std::pair<size_t, uint64_t>> storages_;
  std::map<std::tuple<uint64_t, uint64_t, at::ScalarType, std::vector<int64_t>>, Names> places_;  // by place in rank 0's file
  std::vector<nlohmann::json> groups_;
};

}  // namespace

Catalog read_torch_xla(const fs::path& path, TorchXlaContent content) {
  return TorchXlaReader(xla::open_all(path)).take(content);
}

}  // namespace tessera::checkpoint
