// Writes folders of torch.distributed.checkpoint.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/dcp/names.h"
#include "tessera/checkpoint/formats/torch/pickle.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;
using pickle::Value;
using Fields = std::vector<std::pair<Value, Value>>;

std::string joined_name(const DcpPath& path) {
  const auto text = [](const auto& key) { return fmt::format("{}", key); };
  std::string result;
  for (const auto& key : path) result += (result.empty() ? "" : ".") + std::visit(text, key);
  return result;
}

Value integers(const std::vector<int64_t>& numbers) {
  return pickle::Tuple{.items = {numbers.begin(), numbers.end()}};
}
Value size_of(const std::vector<int64_t>& numbers) {
  return pickle::Object{.name = dcp::kSize, .arguments = {integers(numbers)}};
}
Value object(const char* name, Fields fields) {
  return pickle::Object{.name = name, .state = pickle::Dict{.entries = std::move(fields)}, .made = pickle::Object::Made::New};
}

Value properties_of(at::ScalarType dtype) {
  const Value layout = pickle::Object{.name = dcp::kLayout, .arguments = {"torch.strided"}};
  const Value contiguous = pickle::Object{.name = dcp::kMemoryFormat, .arguments = {int64_t{0}}};
  const Value type = pickle::Global{std::string("torch.") + torch_dtype(dtype)->name};
  return pickle::Object{.name = dcp::kProperties,
                        .state = pickle::Tuple{.items = {type, layout, false, contiguous, false}},
                        .made = pickle::Object::Made::New};
}

/// Throws UsageError unless the boxes of a tensor cover each of its values exactly once.
void expect_partition(const std::string& name, const std::vector<int64_t>& shape, std::vector<const TensorSlice*> boxes) {
  std::ranges::sort(boxes, {}, [](const auto* box) { return box->offsets; });
  int64_t numel = 0;
  for (size_t i = 0; i < boxes.size(); i++) {
    numel += boxes[i]->numel();
    for (size_t k = i + 1; k < boxes.size(); k++) {
      // The boxes are sorted by their offsets: in dimension 0, box k and all later boxes begin at or after the end of box i.
      if (!shape.empty() && boxes[k]->offsets[0] >= boxes[i]->offsets[0] + boxes[i]->sizes[0]) break;
      if (!intersection(*boxes[i], *boxes[k])) continue;
      throw UsageError("the parts {} and {} of '{}' overlap", to_string(*boxes[i]), to_string(*boxes[k]), name);
    }
  }
  if (numel == whole_slice(shape).numel()) return;
  throw UsageError("the parts of '{}' have {} of its {} values; each rank has to report what it has written", name, numel,
                   whole_slice(shape).numel());
}

/// The items of one name.
struct Named {
  const DcpItem* first = nullptr;
  std::vector<const DcpItem*> items = {};  // without duplicates from other ranks
  std::set<std::pair<std::vector<int64_t>, std::vector<int64_t>>> boxes = {};
};

Value index_of(const std::string& name, const DcpItem& item, size_t number) {
  Fields fields{{"fqn", name}, {"index", {}}};
  if (item.part) fields = {{"fqn", name}, {"index", static_cast<int64_t>(number)}, {"offset", size_of(item.part->box.offsets)}};
  return object(dcp::kIndex, std::move(fields));
}

Value storage_of(const DcpItem& item) {
  return object(
      dcp::kStorageInfo,
      {{"relative_path", item.file}, {"offset", static_cast<int64_t>(item.offset)}, {"length", static_cast<int64_t>(item.bytes)}});
}

/// Adds an item to the items of its name. Throws UsageError if its path, dtype or shape differs from the first item's.
void add(const std::string& name, Named& named, const DcpItem& item) {
  if (named.first == nullptr) named.first = &item;
  const auto& first = *named.first;
  if (item.path != first.path) throw UsageError("the keys of two values, joined by dots, are both '{}'; rename one of the values", name);
  const bool agrees = item.part.has_value() == first.part.has_value() &&
                      (!item.part || (item.part->dtype == first.part->dtype && item.part->box.shape == first.part->box.shape));
  if (!agrees) throw UsageError("the parts of '{}' differ in dtype or shape", name);
  const auto box = item.part.value_or(DcpItem::Part{}).box;
  if (named.boxes.emplace(box.offsets, box.sizes).second) named.items.push_back(&item);
}

Value metadata_of(const std::string& name, const Named& named) {
  if (!named.first->part) return object(dcp::kBytes, {});
  const auto& [dtype, any_box] = *named.first->part;
  std::vector<const TensorSlice*> boxes;
  pickle::List chunks;
  for (const auto* const item : named.items) {
    const auto& box = item->part->box;
    boxes.push_back(&box);
    chunks.items.push_back(object(dcp::kChunk, {{"offsets", size_of(box.offsets)}, {"sizes", size_of(box.sizes)}}));
  }
  expect_partition(name, any_box.shape, std::move(boxes));
  return object(dcp::kTensor, {{"properties", properties_of(dtype)}, {"size", size_of(any_box.shape)}, {"chunks", std::move(chunks)}});
}

}  // namespace

DcpRankWriter::DcpRankWriter(const fs::path& folder, int rank) : name_(fmt::format("__{}_0.distcp", rank)), file_(folder / name_) {}

void DcpRankWriter::write(const DcpPath& path, const TensorSlice& box, const at::Tensor& values) {
  if (values.sizes() != at::IntArrayRef(box.sizes)) {
    throw UsageError("the part {} of '{}' was given values of the shape [{}]", to_string(box), joined_name(path), joined(values.sizes()));
  }
  write(path, box, values.scalar_type(), [&](TorchArchiveWriter& archive) { archive.write(values); });
}

void DcpRankWriter::write(const DcpPath& path, const TensorSlice& box, at::ScalarType dtype,
                          c10::function_ref<void(TorchArchiveWriter&)> fill) {
  if (!box.fits()) throw UsageError("'{}' has a part {} outside of its shape", joined_name(path), to_string(box));
  TorchArchiveWriter archive(file_, end_, pickle::Tensor{.dtype = dtype, .shape = box.sizes});
  fill(archive);
  add({.path = path, .part = DcpItem::Part{.dtype = dtype, .box = box}}, archive);
}

void DcpRankWriter::write(const DcpPath& path, const Value& value) {
  TorchArchiveWriter archive(file_, end_, value);
  add({.path = path}, archive);
}

void DcpRankWriter::add(DcpItem item, TorchArchiveWriter& archive) {
  item.file = name_;
  item.offset = end_;
  item.bytes = archive.close();
  item.checksum = archive.checksum();
  end_ += item.bytes;
  items_.push_back(std::move(item));
}

std::vector<DcpItem> DcpRankWriter::close() {
  file_.commit();
  return std::move(items_);
}

void write_dcp_metadata(const fs::path& folder, std::span<const DcpItem> items, uint64_t save) {
  std::vector<std::string> order;
  std::map<std::string, Named> named;
  for (const auto& item : items) {
    const auto name = joined_name(item.path);
    const auto [found, is_new] = named.try_emplace(name);
    if (is_new) order.push_back(name);
    add(name, found->second, item);
  }
  Fields entries, paths, places;
  std::string checksums(Checksum::kDigits, '0');
  for (const auto& name : order) {
    const auto& all = named.at(name);
    entries.emplace_back(name, metadata_of(name, all));
    pickle::Tuple path;
    for (const auto& key : all.first->path) path.items.push_back(std::visit([](const auto& each) { return Value(each); }, key));
    paths.emplace_back(name, std::move(path));
    for (size_t i = 0; i < all.items.size(); i++) {
      places.emplace_back(index_of(name, *all.items[i], i), storage_of(*all.items[i]));
      checksums += all.items[i]->checksum;
    }
  }
  const pickle::Dict note{.entries = {{dcp::kChecksums, checksums}, {dcp::kSave, static_cast<int64_t>(save)}}};
  auto text = pickle::write(object(dcp::kMetadata, {{dcp::kNote, note},
                                                    {"state_dict_metadata", pickle::Dict{.entries = std::move(entries)}},
                                                    {"planner_data", pickle::Dict{.entries = std::move(paths)}},
                                                    {"storage_data", pickle::Dict{.entries = std::move(places)}},
                                                    {"storage_meta", {}},
                                                    {"version", dcp::kVersion}}));
  text.replace(text.find(checksums), Checksum::kDigits, checksum_around(text, checksums).value());
  write_text(folder / dcp::kFile, text);
}

void to_json(nlohmann::json& json, const DcpItem& item) {
  auto path = nlohmann::json::array();
  for (const auto& key : item.path) path.push_back(std::visit([](const auto& each) { return nlohmann::json(each); }, key));
  json = {std::move(path), item.file, item.offset, item.bytes, item.checksum};
  if (!item.part) return;
  const auto& [dtype, box] = *item.part;
  json.insert(json.end(), {static_cast<int>(dtype), box.shape, box.offsets, box.sizes});
}

void from_json(const nlohmann::json& json, DcpItem& item) {
  item = {.file = json.at(1), .offset = json.at(2), .bytes = json.at(3), .checksum = json.at(4)};
  for (const auto& key : json.at(0)) {
    if (key.is_string()) {
      item.path.emplace_back(key.get<std::string>());
    } else {
      item.path.emplace_back(key.get<int64_t>());
    }
  }
  if (json.size() == 5) return;
  item.part = {.dtype = static_cast<at::ScalarType>(json.at(5).get<int>()),
               .box = {.shape = json.at(6), .offsets = json.at(7), .sizes = json.at(8)}};
}

}  // namespace tessera::checkpoint
