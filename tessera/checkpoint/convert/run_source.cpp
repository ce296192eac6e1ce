#include "tessera/checkpoint/convert/run_source.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <optional>
#include <set>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert/pieces.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/stored/narrowed.h"
#include "tessera/checkpoint/stored/optimizer_keys.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/self/self.h"

namespace tessera::checkpoint {
namespace {

constexpr Subject kSubject{.unit = "checkpoint"};

/// Returns the rows of a rank as FSDP2 divides them.
std::vector<TensorSlice> rows_of(const std::vector<int64_t>& shape, int rank, int ranks) {
  auto box = whole_slice(shape);
  if (shape.empty()) return rank == 0 ? std::vector{box} : std::vector<TensorSlice>();
  const auto rows = shape.front(), each = std::max<int64_t>((rows + ranks - 1) / ranks, 1);
  box.offsets.front() = rank * each;
  box.sizes.front() = std::min(each, rows - rank * each);
  return rank == 0 || box.sizes.front() > 0 ? std::vector{box} : std::vector<TensorSlice>();
}

/// Merges two lists of names and keeps the order of both: a name that only `others` has is put before the name that follows it in `others`.
std::vector<std::string> merged_names(std::vector<std::string> names, const std::vector<std::string>& others) {
  auto next = names.size();
  for (auto other = others.rbegin(); other != others.rend(); other++) {
    const auto found = std::ranges::find(names, *other);
    next = std::min(next, static_cast<size_t>(found - names.begin()));
    if (found == names.end()) names.insert(names.begin() + static_cast<std::ptrdiff_t>(next), *other);
  }
  return names;
}

/// Says in words of which kind the value of a setting is.
std::string_view settings_kind(const nlohmann::json& value) {
  return value.is_number() ? "a number" : value.is_boolean() ? "true or false" : value.is_array() ? "a list" : value.type_name();
}

}  // namespace

using nlohmann::json;

int64_t SourceTensor::bytes() const {
  return c10::multiply_integers(shape) * static_cast<int64_t>(c10::elementSize(dtype));
}

RunSource::RunSource(Manifest run, const ConvertOptions& options)
    : RunSource(run, CatalogReader(run.catalog), options, self_world(0, at::kCPU), "could not write", "could not write") {
  if (!options.weights_only && !run_.catalog.faults.empty()) throw IoError(run_.catalog.faults.front());
  for (const auto& bytes : run_.catalog.checksums) stored_.verify(bytes);
}

RunSource::RunSource(LiveRun live, const ConvertOptions& options, const Communicator& world, std::string failure, std::string end_failure)
    : RunSource(live.run, CatalogReader(live.run.catalog, std::move(live.memories)), options, world, std::move(failure),
                std::move(end_failure)) {
  is_live_ = true;
}

RunSource::RunSource(Manifest run, CatalogReader stored, const ConvertOptions& options, Communicator world, std::string failure,
                     std::string end_failure)
    : run_(std::move(run)),
      options_(options),
      stored_(std::move(stored)),
      world_(std::move(world)),
      failure_(std::move(failure)),
      end_failure_(std::move(end_failure)) {
  for (const auto& [name, tensor] : run_.catalog.tensors) {
    stored_.expect_complete(name);
    if (name == run_.generator || name == run_.device_generator) continue;
    SourceTensor entry{.name = name, .dtype = tensor.dtype, .shape = tensor.shape};
    if (run_.beside.contains(name)) {
      entry.key = name.substr(std::string_view(kBesidePrefix).size());
      beside_.push_back(entry);
    } else if (is_optimizer_state(name, run_)) {
      const auto [parameter, key] = state_name(name);
      entry.parameter = parameter;
      entry.key = torch_key(run_.optimizer, key);
      state_.push_back(entry);
    } else {
      if (options.dtype && at::isFloatingType(tensor.dtype)) entry.dtype = *options.dtype;
      model_.push_back(entry);
    }
    all_ += entry.bytes();
  }
}

bool RunSource::is_for_me(size_t number) const {
  return std::ranges::find(world_.local_ranks(), static_cast<int>(number % static_cast<size_t>(world_.size()))) !=
         world_.local_ranks().end();
}

void RunSource::expect_seen(const std::filesystem::path& path) const {
  if (is_there(path)) return;
  throw IoError("{}, which rank 0 has made, is not there for rank {}; save where all ranks see the same files", path, ranks().front());
}

void RunSource::on_each(c10::function_ref<void()> act) const {
  all_or_none(world_, kSubject, failure_, act);
}

void RunSource::on_first(c10::function_ref<void()> act) const {
  on_each([&] {
    if (is_first()) act();
  });
}

void RunSource::end_on_first(c10::function_ref<void()> act) const {
  all_or_none(world_, kSubject, end_failure_, [&] {
    if (is_first()) act();
  });
}

void RunSource::in_new_folder(const std::filesystem::path& path, c10::function_ref<void(const std::filesystem::path& folder)> fill) const {
  std::optional<NewFolder> made;
  on_first([&] { made.emplace(path); });
  try {
    fill(unfinished_path(path));
    end_on_first([&] { made->commit(); });
  } catch (const CommError&) {
    if (made) made->abandon();
    throw;
  }
}

std::vector<std::string> RunSource::texts(const std::string& own) const {
  return world_.texts(own, kSubject);
}

std::vector<int> RunSource::ranks() const {
  if (is_live_) return world_.local_ranks();
  std::vector<int> all(static_cast<size_t>(options_.world));
  std::iota(all.begin(), all.end(), 0);
  return all;
}

std::vector<TensorSlice> RunSource::boxes(const SourceTensor& tensor, int rank) const {
  if (!is_live_) return rows_of(tensor.shape, rank, options_.world);
  std::map<std::pair<std::vector<int64_t>, std::vector<int64_t>>, std::vector<const StoredBox*>> owners;
  for (const auto& stored : stored_.info(tensor.name).boxes) owners[{stored.box.offsets, stored.box.sizes}].push_back(&stored);
  std::vector<TensorSlice> result;
  for (const auto& [place, stored] : owners) {
    const bool is_buffer = run_.catalog.buffers.contains(tensor.name);
    const auto* const chosen = stored[is_buffer ? 0 : checksum_value(tensor.name) % stored.size()];  // spreads such boxes over their ranks
    if (static_cast<int>(chosen->file) == rank) result.push_back(chosen->box);
  }
  if (c10::multiply_integers(tensor.shape) > 0) return result;
  return rank == 0 ? std::vector{whole_slice(tensor.shape)} : std::vector<TensorSlice>();
}

void RunSource::copy(const SourceTensor& tensor, const TensorSlice& box,
                     c10::function_ref<void(const TensorSlice&, const at::Tensor&)> write, size_t first) const {
  const auto dtype = options_.dtype ? stored_.info(tensor.name).dtype : tensor.dtype;
  const auto width = std::max(c10::elementSize(dtype), c10::elementSize(tensor.dtype));
  const auto most = std::max<int64_t>(options_.memory / static_cast<int64_t>(width), 1);
  for_each_piece(box, most, [&](const TensorSlice& piece) {
    auto values = at::empty(piece.sizes, at::TensorOptions(at::kCPU).dtype(dtype));
    stored_.read(tensor.name, piece, values, first);
    if (dtype != tensor.dtype) values = narrowed(values, tensor.dtype, tensor.name);
    write(piece, values);
    done_ = std::min(done_ + static_cast<int64_t>(values.nbytes()), all_);
    if (options_.progress) options_.progress(tensor.name, done_, all_);
  });
}

void RunSource::copy(const SourceTensor& tensor, c10::function_ref<void(const at::Tensor&)> write) const {
  copy(tensor, whole_slice(tensor.shape), [&](const TensorSlice&, const at::Tensor& values) { write(values); });
}

std::map<std::string, std::string> RunSource::notes() const {
  return notes_of_rank(run_, 0, 1, {.notes_of_first_rank = options_.notes_of_first_rank});
}

void RunSource::expect_known_settings(const json& group) const {
  std::vector<std::string> known;
  for (const auto& [name, value] : group.items()) {
    if (name != "params") known.push_back(name);
  }
  for (const auto& [name, given] : options_.settings) {
    // Without `known`, Tessera does not know the settings of this optimizer.
    if (!known.empty() && !group.contains(name)) throw UsageError("{} has no setting '{}'; it has {}", run_.optimizer, name, joined(known));
    const auto usual = group.value(name, name == "lr" ? json(0.001) : name == "momentum" ? json(0.9) : json());
    const auto value = setting_of(given.text());
    if (usual.is_null() ? !value.is_object() : settings_kind(usual) == settings_kind(value)) continue;
    throw UsageError(
        "the setting '{}' of {} can't be {}; give {}", name, run_.optimizer, value.dump(),
        usual.is_null() ? "a number, true, false or a list" : fmt::format("{}, such as {}", settings_kind(usual), usual.dump()));
  }
}

void RunSource::add_parameters_of_others(json& groups) const {
  std::set<std::string> seen;
  for (size_t rank = 0; rank < run_.notes.size(); rank++) {
    const auto note = run_.notes[rank].find(kSettingsNote);
    if (note == run_.notes[rank].end() || !seen.insert(note->second).second) continue;
    const auto others = json::parse(note->second, nullptr, false);
    if (others.size() != groups.size()) {
      throw UsageError(
          "the optimizer has {} groups of parameters on rank 0 and {} on rank {}, but {} has one list of groups for all ranks; give "
          "each rank the same groups, or save in Tessera's format",
          groups.size(), others.size(), rank, name_of(options_.to));
    }
    for (size_t i = 0; i < groups.size(); i++) groups[i]["params"] = merged_names(groups[i]["params"], others[i]["params"]);
  }
}

json RunSource::settings() const {
  auto groups = json::array();
  const auto notes = this->notes();
  if (const auto note = notes.find(kSettingsNote); note != notes.end()) groups = json::parse(note->second, nullptr, false);
  const bool is_known =
      groups.is_array() && !groups.empty() && std::ranges::all_of(groups, [](const json& group) { return group.is_object(); });
  if (is_known && is_live_) add_parameters_of_others(groups);
  if (!is_known) {
    std::vector<std::string> needed = {"lr"};
    auto parameters = json::array();
    for (const auto& tensor : state_) {
      if (parameters.empty() || parameters.back() != tensor.parameter) parameters.push_back(tensor.parameter);
      if (tensor.key == "momentum_buffer" && needed.size() == 1) needed.emplace_back("momentum");
    }
    if (state_.empty()) {
      for (const auto& tensor : model_) {
        if (!run_.catalog.buffers.contains(tensor.name)) parameters.push_back(tensor.name);
      }
    }
    for (const auto& name : needed) {
      if (options_.settings.contains(name)) continue;
      throw UsageError(
          "the checkpoint does not say which '{0}' its optimizer ({1}) had, and Python takes it from the files: give it with "
          ".settings = {{{{\"{0}\", VALUE}}}}, or convert the weights only (.weights_only = true)",
          name, run_.optimizer);
    }
    auto group = default_settings(run_.optimizer);
    group["params"] = parameters;
    groups = json::array({group});
  }
  expect_known_settings(groups.front());
  for (auto& group : groups) {
    for (const auto& [name, setting] : options_.settings) group[name] = setting_of(setting.text());
    // Python's schedulers add initial_lr, and expect it when they load.
    if (group.contains("lr") && !group.contains("initial_lr")) group["initial_lr"] = group["lr"];
  }
  return groups;
}

at::ScalarType RunSource::python_dtype(const SourceTensor& tensor) {
  return tensor.key == "step" && tensor.shape.empty() ? at::kFloat : tensor.dtype;
}

json setting_of(const std::string& text) {
  auto value = json::parse(text, nullptr, false);
  return value.is_discarded() ? json(text) : value;
}

json value_of_note(const std::string& text) {
  auto value = setting_of(text);
  const bool is_too_large = value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(INT64_MAX);
  return is_too_large || value.dump() != text ? json(text) : value;
}

}  // namespace tessera::checkpoint
