#include <fmt/format.h>
#include <fmt/ranges.h>
#include <glob.h>

#include <algorithm>
#include <tuple>
#include <unordered_map>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/base/numel.h"
#include "tessera/checkpoint/formats/torch_archive.h"
#include "tessera/checkpoint/formats/torch_pickle.h"
#include "tessera/checkpoint/formats/torch_xla.h"
#include "tessera/checkpoint/formats/torch_xla_names.h"
#include "tessera/checkpoint/rank_file.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
namespace xla = torch_xla;
using pickle::Dict;
using pickle::Value;

TorchArchive open_archive(const fs::path& path) {
  const InputFile file(path);
  return {file, 0, file.size(), torch_globals, path.string()};
}

bool is_of_shard(const std::string& name) {
  return name.starts_with(xla::kShard) || name.find("." + std::string(xla::kShard)) != std::string::npos;
}

/// One rank's file.
class RankContent {
 public:
  explicit RankContent(const fs::path& path) : path_(path), archive_(open_archive(path)) {
    if (content().find(xla::kMetadata) == nullptr) {
      if (!has_whole_model())
        fail("has no 'shard_metadata', without which nobody knows what its shards are; save get_shard_metadata() with them");
      return;
    }
    rank_ = integer("rank");
    ranks_ = integer("world_size");
    const auto named = rank_in_name(path.filename().string(), path.extension().string());
    if (named && (named->first != rank_ || named->second != ranks_)) {
      fail(fmt::format("was written by rank {} of {}; somebody has renamed it", rank_, ranks_));
    }
    for (const auto& [key, value] : dict(content(), xla::kModel).entries) {
      const auto name = to_name(key);
      if (!name || !tensors_.emplace(*name, &value).second) fail("has a model with a name that is none, or is there twice");
      names_.push_back(*name);
    }
  }

  const fs::path& path() const { return path_; }
  int64_t rank() const { return rank_; }
  int64_t ranks() const { return ranks_; }
  const TorchArchive& archive() const { return archive_; }
  const std::vector<std::string>& names() const { return names_; }  // of the model's state, in their order
  bool is_whole() const { return ranks_ == 0; }

  [[noreturn]] void fail(const std::string& why) const { throw IoError(fmt::format("{} {}", path_.string(), why)); }

  const Dict& content() const {
    const auto* const result = archive_.content().as<Dict>();
    if (result == nullptr) fail(fmt::format("holds {} instead of a dict", archive_.content().kind()));
    return *result;
  }
  const Dict& metadata() const { return dict(content(), xla::kMetadata); }
  const Dict& dict(const Dict& outer, std::string_view key) const {
    const auto* const found = outer.find(key);
    if (found == nullptr || found->as<Dict>() == nullptr) fail(fmt::format("has no dict '{}'", key));
    return *found->as<Dict>();
  }
  /// What a file of torch_xla has under this name in its model; nullptr if that is none.
  const Value* value(const std::string& name) const {
    const auto found = tensors_.find(name);
    return found == tensors_.end() ? nullptr : found->second;
  }
  ArchivedTensor tensor(const std::string& name) const {
    const auto* const found = value(name);
    const auto result = found == nullptr ? std::nullopt : archive_.tensor(*found, name);
    if (!result) fail(fmt::format("has no tensor '{}', which its shard_info promises", name));
    return *result;
  }

 private:
  /// As a consolidated file has, which may lie beside the rank files.
  bool has_whole_model() const {
    const auto* const model = content().find(xla::kModel);
    if (model == nullptr || model->as<Dict>() == nullptr) return false;
    return std::ranges::none_of(model->as<Dict>()->entries, [](const auto& entry) {
      const auto name = to_name(entry.first);
      return name && is_of_shard(*name);
    });
  }
  int64_t integer(const char* key) const {
    const auto* const found = metadata().find(key);
    const auto* const result = found == nullptr ? nullptr : found->as<int64_t>();
    if (result == nullptr || *result < 0 || *result > INT32_MAX || (*result == 0 && key == std::string_view("world_size"))) {
      fail(fmt::format("has a shard_metadata without a '{}'", key));
    }
    return *result;
  }

  fs::path path_;
  TorchArchive archive_;
  int64_t rank_ = 0, ranks_ = 0;
  std::vector<std::string> names_;
  std::unordered_map<std::string, const Value*> tensors_;
};

/// Reads shard_info and flatten_info.
class LayoutReader {
 public:
  explicit LayoutReader(const RankContent& file) : file_(file) {}

  std::vector<TorchXlaShard> read() const {
    std::vector<TorchXlaShard> shards;
    for (const auto& [module, own] : file_.dict(file_.metadata(), "shard_info").entries) {
      const auto name = to_name(module);
      if (!name || own.as<Dict>() == nullptr) file_.fail("has a shard_info that makes no sense");
      for (const auto& [key, place] : own.as<Dict>()->entries) shards.push_back(shard(*name, key, place));
    }
    return shards;
  }

 private:
  TorchXlaShard shard(const std::string& module, const Value& key, const Value& place) const {
    const auto* const own = place.as<Dict>();
    const auto* const original = own == nullptr ? nullptr : own->find("_orig_name");
    const auto* const size = own == nullptr ? nullptr : own->find("_orig_size");
    const auto name = to_name(key);
    const auto shape = size == nullptr ? std::nullopt : to_integers(*size);
    if (!name || original == nullptr || original->as<std::string>() == nullptr || !shape || !checked_numel(*shape, kWidest)) {
      file_.fail(fmt::format("has a shard_info that does not say name and size of '{}'", name.value_or("")));
    }
    TorchXlaShard result{.module = module, .original_name = *original->as<std::string>(), .shape = *shape};
    if (result.name() != *name) file_.fail(fmt::format("has a shard_info in which '{}' is said to be '{}'", *name, result.original_name));
    const auto full = xla::joined(module, result.original_name);
    if (full.find(std::string(xla::kWrapped) + std::string(xla::kFlatParameter)) == std::string::npos) {
      result.parts = {{.name = xla::without_wrappers(full), .original_name = result.original_name, .shape = *shape}};
    } else {
      result.parts = parts(full, *checked_numel(*shape));
    }
    return result;
  }

  /// Of a flat parameter: from (names, shapes, numbers of values).
  std::vector<TorchXlaShard::Part> parts(const std::string& flat, int64_t numel) const {
    const auto* const found = file_.dict(file_.metadata(), "flatten_info").find(flat);
    const auto json = found == nullptr ? std::nullopt : to_json(*found);
    const auto refuse = [&] { file_.fail(fmt::format("has a flatten_info that does not fit '{}'", flat)); };
    if (!json || !json->is_array() || json->size() != 3) refuse();
    std::vector<TorchXlaShard::Part> result;
    try {
      const auto names = json->at(0).get<std::vector<std::string>>();
      const auto shapes = json->at(1).get<std::vector<std::vector<int64_t>>>();
      const auto numels = json->at(2).get<std::vector<int64_t>>();
      if (shapes.size() != names.size() || numels.size() != names.size()) refuse();
      for (size_t i = 0; i < names.size(); i++) {
        const auto own = checked_numel(shapes[i], kWidest);
        if (!own || *own / kWidest != numels[i] || numels[i] > numel) refuse();
        numel -= numels[i];
        const auto dot = flat.rfind('.');
        const auto wrapper = dot == std::string::npos ? "" : flat.substr(0, dot);
        result.push_back({.name = xla::without_wrappers(xla::joined(wrapper, names[i])), .original_name = names[i], .shape = shapes[i]});
      }
    } catch (const nlohmann::json::exception&) {
      refuse();
    }
    if (numel != 0 || result.empty()) refuse();
    return result;
  }

  static constexpr int64_t kWidest = 16;  // bytes in a value: sizes in bytes must not overflow either
  const RankContent& file_;
};

/// The files of all ranks, in the order of the ranks.
std::vector<RankContent> open_all(const fs::path& path) {
  const auto paths = torch_xla_files(path);
  std::vector<RankContent> files;
  for (const auto& each : paths) {
    files.emplace_back(each);
    if (files.back().is_whole()) files.pop_back();
  }
  if (files.empty()) throw IoError(fmt::format("there are no rank files of torch_xla {}", path.string()));
  std::ranges::stable_sort(files, {}, &RankContent::rank);
  const auto ranks = files.front().ranks();
  for (const auto& file : files) {
    if (file.ranks() == ranks) continue;
    throw IoError(fmt::format("{} is of {} ranks and {} of {}: these are files of two checkpoints", files.front().path().string(), ranks,
                              file.path().string(), file.ranks()));
  }
  for (size_t i = 0; i < files.size(); i++) {
    const auto& file = files[i];
    if (i > 0 && file.rank() == files[i - 1].rank()) {
      throw IoError(fmt::format("{} and {} are both of rank {}; somebody has copied one", files[i - 1].path().string(),
                                file.path().string(), file.rank()));
    }
    if (file.rank() >= ranks) file.fail(fmt::format("says that it is of rank {} of {}", file.rank(), ranks));
  }
  for (int64_t rank = 0; rank < ranks; rank++) {
    if (static_cast<size_t>(rank) < files.size() && files[static_cast<size_t>(rank)].rank() == rank) continue;
    throw IoError(fmt::format("{} is of {} ranks, but the file of rank {} is missing{}", files.front().path().string(), ranks, rank,
                              paths.size() == 1 ? "; give the prefix of all of them, or a pattern with *" : ""));
  }
  return files;
}

/// Puts the files of all ranks together.
class TorchXlaReader {
 public:
  explicit TorchXlaReader(std::vector<RankContent> files) : files_(std::move(files)), layout_(LayoutReader(files_.front()).read()) {
    for (const auto& file : files_) catalog_.files.push_back(file.path());
  }

  Catalog take(TorchXlaContent content) {
    for (const auto& shard : layout_) add_shard(shard);
    for (const auto& file : files_) expect_no_other_shards(file);
    add_buffers();
    if (content == TorchXlaContent::All) add_others();
    return std::move(catalog_);
  }

  std::vector<TorchXlaShard> take_layout() {
    int64_t multiple = TorchXlaShard().size_multiple;
    for (auto& shard : layout_) {
      const auto part = parts_of(shard).front();
      shard.on_dim_0 = part.shape.size() > 1;
      if (shard.on_dim_0 || *checked_numel(part.shape) % multiple != 0) multiple = 1;  // then the model's other shards have it, too
    }
    for (auto& shard : layout_) shard.size_multiple = multiple;
    return std::move(layout_);
  }

 private:
  using Names = std::vector<std::string>;

  const RankContent& first() const { return files_.front(); }

  /// The tensor of each rank.
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

  /// Adds tensors that are divided as the shard is, under these names for its parts.
  void add(const TorchXlaShard& shard, const Names& names, const std::vector<ArchivedTensor>& parts) {
    const auto& one = parts.front();
    const auto place = std::tuple(one.storage.begin, one.begin, one.dtype, one.shape);
    if (const auto [known, is_new] = places_.try_emplace(place, names); !is_new && known->second.size() == names.size()) {
      for (size_t i = 0; i < names.size(); i++) {  // a module that is in two places
        if (names[i] != known->second[i]) catalog_.aliases.emplace(names[i], known->second[i]);
      }
      return;
    }
    std::vector<StoredTensor> made;
    for (const auto& part : shard.parts) made.push_back({.dtype = one.dtype, .shape = part.shape});
    int64_t begin = 0;  // of the rank's values or rows, among those of all ranks
    for (size_t rank = 0; rank < parts.size(); rank++) {
      const auto& part = parts[rank];
      const auto refuse = [&] {
        files_[rank].fail(fmt::format("has a part [{}] of '{}', which does not fit its size [{}] in shard_info or the parts of other ranks",
                                      fmt::join(part.shape, ", "), names.front(), fmt::join(shard.shape, ", ")));
      };
      const bool fits = part.dtype == one.dtype && part.shape.size() == one.shape.size() && !part.shape.empty();
      if (!fits || (part.shape.size() > 1 && !add_rows(made.front(), shard, part, begin, rank))) refuse();
      if (part.shape.size() == 1 && part.shape.front() > 1 && part.strides.front() != 1) refuse();
      if (part.shape.size() == 1) add_values(made, part, begin, rank);
      if (__builtin_add_overflow(begin, part.shape.front(), &begin)) refuse();
    }
    const auto needed = one.shape.size() > 1 ? shard.shape.front() : *checked_numel(shard.shape);
    if (begin < needed) {
      first().fail(fmt::format("says in its shard_info that '{}' has the size [{}], but the ranks have together only {} of {}",
                               names.front(), fmt::join(shard.shape, ", "), begin, needed));
    }
    for (size_t i = 0; i < names.size(); i++) add_tensor(names[i], std::move(made[i]));
    for (size_t rank = 0; rank < parts.size(); rank++) add_checksum(rank, parts[rank], names.front());
  }

  /// Whole rows of a tensor that is not flat. False if they do not fit.
  static bool add_rows(StoredTensor& tensor, const TorchXlaShard& shard, const ArchivedTensor& part, int64_t begin, size_t rank) {
    const bool fits =
        part.shape.size() == shard.shape.size() && std::equal(part.shape.begin() + 1, part.shape.end(), shard.shape.begin() + 1);
    if (!fits || shard.is_flat()) return false;
    auto box = whole_slice(shard.shape);
    box.offsets.front() = begin;
    box.sizes.front() = std::min(part.shape.front(), shard.shape.front() - begin);
    if (box.sizes.front() > 0) tensor.boxes.push_back({.box = box, .file = rank, .offset = part.begin, .strides = part.strides});
    return true;
  }

  /// Values of tensors that lie one after the other, each in row-major order.
  static void add_values(std::vector<StoredTensor>& tensors, const ArchivedTensor& part, int64_t begin, size_t rank) {
    const auto width = static_cast<int64_t>(c10::elementSize(part.dtype));
    const auto end = part.shape.front() > INT64_MAX - begin ? INT64_MAX : begin + part.shape.front();
    int64_t place = 0;  // where the tensor begins, among all
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
    if (!catalog_.tensors.emplace(name, std::move(tensor)).second)
      first().fail(fmt::format("has two tensors that are '{}' in the model", name));
  }

  void add_checksum(size_t rank, const ArchivedTensor& tensor, const std::string& name) {
    const auto& storage = tensor.storage;
    if (storage.crc32 == 0 || !storages_.emplace(rank, storage.begin).second) return;
    catalog_.checksums.push_back(
        {.file = rank, .begin = storage.begin, .bytes = storage.bytes, .checksum = fmt::format("{:08x}", storage.crc32), .name = name});
  }

  void expect_no_other_shards(const RankContent& file) {
    if (known_.empty()) {
      for (const auto& shard : layout_) known_.insert(shard.state_name());
    }
    for (const auto& name : file.names()) {
      if (is_of_shard(name) && !known_.contains(name))
        file.fail(fmt::format("has a '{}', of which rank 0's shard_info does not know", name));
    }
  }

  void add_whole(const std::string& name, const ArchivedTensor& tensor, std::optional<at::ScalarType> dtype = {}) {
    StoredTensor stored{.dtype = dtype.value_or(tensor.dtype), .shape = tensor.shape};
    stored.boxes = {{.box = whole_slice(tensor.shape), .offset = tensor.begin, .strides = tensor.strides}};
    if (stored.dtype != tensor.dtype) stored.rounded = tensor.dtype;
    add_tensor(name, std::move(stored));
    add_checksum(0, tensor, name);
  }

  /// What is not divided, from rank 0. The names in buffer_info may have a wrapper's name that those of the state lack.
  void add_buffers() {
    std::map<std::string, at::ScalarType> dtypes;
    const auto* const info = first().metadata().find("buffer_info");
    const auto* const dict = info == nullptr ? nullptr : info->as<Dict>();
    for (const auto& [key, value] : dict == nullptr ? Dict().entries : dict->entries) {
      const auto name = to_name(key);
      const auto* const place = value.as<Dict>();
      const auto* const original = place == nullptr ? nullptr : place->find("_orig_dtype");
      const auto* const global = original == nullptr ? nullptr : original->as<pickle::Global>();
      const auto* const dtype = global == nullptr ? nullptr : torch_dtype_named(global->name);
      if (!name || dtype == nullptr) first().fail("has a buffer_info that says no dtype");
      dtypes[xla::without_wrappers(*name)] = dtype->type;
    }
    for (const auto& stored : first().names()) {
      if (is_of_shard(stored)) continue;
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
    for (const auto& [key, value] : first().content().entries) {
      const auto name = to_name(key);
      if (!name || name == xla::kModel || name == xla::kMetadata || name == xla::kOptimizer) continue;
      if (auto json = to_json(value)) catalog_.values[*name] = std::move(*json);
    }
    if (first().content().find(xla::kOptimizer) == nullptr) return;
    add_settings();
    if (const auto why = why_no_state()) {
      log(LogLevel::Warning, fmt::format("the optimizer's state in {} is left out: {}", first().path().string(), *why));
      return;
    }
    for (size_t i = 0; i < layout_.size(); i++) add_state(i);
  }

  void add_settings() {
    const auto* const groups = first().dict(first().content(), xla::kOptimizer).find("param_groups");
    const auto json = groups == nullptr ? std::nullopt : to_json(*groups);
    if (!json || !json->is_array()) return;
    for (size_t i = 0; i < json->size(); i++) {
      groups_.push_back(json->at(i));
      if (!json->at(i).is_object()) continue;
      for (const auto& [key, value] : json->at(i).items()) catalog_.values[fmt::format("optimizer.param_groups.{}.{}", i, key)] = value;
    }
  }

  /// The state is by numbers, which are the order of the parameters in the optimizer: that of the model if all of them are in one group.
  std::optional<std::string> why_no_state() const {
    if (groups_.size() != 1) return fmt::format("it has {} groups of parameters, and nothing says which is in which", groups_.size());
    auto order = nlohmann::json::array();
    for (size_t i = 0; i < layout_.size(); i++) order.push_back(i);
    if (!groups_.front().is_object() || groups_.front().value("params", nlohmann::json()) != order) {
      return fmt::format("it has not the {} parameters of the model, and nothing says which it has", layout_.size());
    }
    for (const auto& file : files_) {
      const auto* const state = file.dict(file.content(), xla::kOptimizer).find("state");
      if (state == nullptr || state->as<Dict>() == nullptr) return file.path().string() + " has none";
    }
    return {};
  }

  /// What each rank has as the state of a parameter.
  std::vector<const Dict*> states(size_t parameter) const {
    std::vector<const Dict*> result;
    for (const auto& file : files_) {
      const auto& state = file.dict(file.dict(file.content(), xla::kOptimizer), "state");
      const auto found = std::ranges::find_if(state.entries, [&](const auto& entry) {
        const auto* const number = entry.first.template as<int64_t>();
        return number != nullptr && *number == static_cast<int64_t>(parameter);
      });
      if (found == state.entries.end() || found->second.template as<Dict>() == nullptr) return {};  // it has never had a gradient
      result.push_back(found->second.template as<Dict>());
    }
    return result;
  }

  void add_state(size_t parameter) {
    const auto& shard = layout_[parameter];
    const auto own = parts_of(shard);
    const auto all = states(parameter);
    if (all.empty() || catalog_.aliases.contains(shard.parts.front().name)) return;
    for (const auto& [key, value] : all.front()->entries) {
      const auto text = to_name(key);
      if (!text) continue;
      Names names;
      for (const auto& part : shard.parts) names.push_back(fmt::format("{}{}.{}", kOptimizerPrefix, part.name, *text));
      std::vector<ArchivedTensor> parts;
      for (size_t rank = 0; rank < files_.size(); rank++) {
        const auto* const there = all[rank]->find(*text);
        const auto tensor = there == nullptr ? std::nullopt : files_[rank].archive().tensor(*there, names.front());
        if (tensor) parts.push_back(*tensor);
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
            fmt::format("'{}' in {} is left out: it is not divided as its parameter is", names.front(), first().path().string()));
      }
    }
  }

  const std::vector<RankContent> files_;
  std::vector<TorchXlaShard> layout_;
  Catalog catalog_;
  std::set<std::string> known_;  // the shards of the layout
  std::set<std::pair<size_t, uint64_t>> storages_;
  std::map<std::tuple<uint64_t, uint64_t, at::ScalarType, std::vector<int64_t>>, Names> places_;  // in rank 0's file
  std::vector<nlohmann::json> groups_;
};

std::vector<fs::path> files_like(const fs::path& pattern) {
  struct Found : glob_t {
    Found() : glob_t{} {}
    Found(const Found&) = delete;
    Found& operator=(const Found&) = delete;
    ~Found() { ::globfree(this); }
  } found;
  const int status = ::glob(pattern.c_str(), 0, nullptr, &found);
  if (status != 0 && status != GLOB_NOMATCH) throw IoError(fmt::format("can't look for the files {}", pattern.string()));
  return {found.gl_pathv, found.gl_pathv + found.gl_pathc};
}

}  // namespace

std::vector<fs::path> torch_xla_files(const fs::path& path) {
  const auto name = path.filename().string();
  const auto of_file = rank_in_name(name, path.extension().string());
  if (is_there(path) && !fs::is_directory(path) && !of_file) return {path};
  if (!is_there(path) && name.find_first_of("*?[") != std::string::npos) return files_like(path);
  const auto start = of_file ? name.substr(0, name.rfind("rank-")) : name + "_";
  const auto extension = of_file ? path.extension().string() : xla::kExtension;
  std::vector<fs::path> result;
  const auto parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  for (const auto& each : names_in(parent).value_or(std::vector<std::string>())) {
    const auto ranks = rank_in_name(each, extension);
    const bool is_of_prefix = ranks && each.starts_with(start) && each.rfind("rank-") == start.size();
    if (is_of_prefix && (!of_file || of_file->second == ranks->second)) result.push_back(path.parent_path() / each);
  }
  return result;
}

bool is_torch_xla_file(const fs::path& path) {
  const auto archive = open_archive(path);
  const auto* const content = archive.content().as<Dict>();
  const auto* const metadata = content == nullptr ? nullptr : content->find(xla::kMetadata);
  return metadata != nullptr && metadata->as<Dict>() != nullptr && metadata->as<Dict>()->find("shard_info") != nullptr;
}

Catalog read_torch_xla(const fs::path& path, TorchXlaContent content) {
  return TorchXlaReader(open_all(path)).take(content);
}

std::vector<TorchXlaShard> read_torch_xla_layout(const fs::path& path) {
  return TorchXlaReader(open_all(path)).take_layout();
}

}  // namespace tessera::checkpoint
