#include "tessera/checkpoint/stored/rank_file.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <charconv>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/numel.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/json_fault.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kKey = "tessera";
constexpr std::string_view kRank = "rank-";
constexpr int kRankFormat = 3;

nlohmann::json to_json(const std::map<std::string, PartRecord>& parts) {
  auto json = nlohmann::json::object();
  for (const auto& [name, part] : parts) {
    auto slices = nlohmann::json::array();
    for (const auto& slice : part.slices) slices.push_back({{"offsets", slice.offsets}, {"sizes", slice.sizes}});
    json[name] = {{"shape", part.shape}, {"strides", part.strides}, {"slices", slices}};
  }
  return json;
}

nlohmann::json to_json(const RankRecord& record) {
  return {{"format", kRankFormat},          {"rank", record.rank},
          {"ranks", record.ranks},          {"save", record.save},
          {"parts", to_json(record.parts)}, {"state", to_json(record.state)},
          {"whole", record.outside},        {"buffers", record.buffers},
          {"aliases", record.aliases},      {"optimizer", record.optimizer},
          {"notes", record.notes},          {"origin", record.origin},
          {"generator", record.generator},  {"beside", record.beside},
          {"by_rank", record.by_rank},      {"device_generator", record.device_generator},
          {"base", to_json(record.base)},   {"adapters", record.adapters}};
}

PartRecord part_from_json(const nlohmann::json& json) {
  PartRecord part{.shape = json.at("shape"), .strides = json.at("strides"), .slices = {}};
  if (part.strides.size() != part.shape.size()) throw IoError("it has not one stride for each dimension");
  auto left = checked_numel(part.shape);
  if (!left) throw IoError("there is no tensor of the shape [{}]", joined(part.shape));
  for (const auto& slice : json.at("slices")) {
    part.slices.push_back({.shape = part.shape, .offsets = slice.at("offsets"), .sizes = slice.at("sizes")});
    if (!part.slices.back().fits()) throw IoError("it has a slice that does not fit into its shape");
    *left -= part.slices.back().numel();
    if (*left < 0) throw IoError("its slices have more values than its shape");
  }
  return part;
}

std::map<std::string, PartRecord> parts_from_json(const nlohmann::json& json) {
  std::map<std::string, PartRecord> parts;
  for (const auto& [name, part] : json.items()) {
    try {
      parts[name] = part_from_json(part);
    } catch (const Error& error) {
      throw IoError("the place of '{}' makes no sense: {}", name, error.what());
    }
  }
  return parts;
}

RankRecord record_from_json(const nlohmann::json& json) {
  if (const auto format = json.at("format").get<int>(); format != kRankFormat)
    throw UsageError("its format is {}, this version of Tessera reads {}; load it with the one that wrote it", format, kRankFormat);
  RankRecord record{.rank = json.at("rank"), .ranks = json.at("ranks"), .save = json.at("save")};
  record.parts = parts_from_json(json.at("parts"));
  record.state = parts_from_json(json.at("state"));
  record.outside = json.at("whole").get<std::vector<std::string>>();
  record.buffers = json.at("buffers").get<std::vector<std::string>>();
  record.aliases = json.at("aliases").get<std::map<std::string, std::string>>();
  record.optimizer = json.at("optimizer").get<std::string>();
  record.notes = json.at("notes").get<std::map<std::string, std::string>>();
  record.origin = json.at("origin").get<std::map<std::string, std::string>>();
  record.generator = json.at("generator").get<std::string>();
  record.device_generator = json.at("device_generator").get<std::string>();
  record.beside = json.at("beside").get<std::vector<std::string>>();
  record.by_rank = json.at("by_rank").get<std::vector<std::string>>();
  record.base = base_from_json(json.at("base"));
  record.adapters = json.at("adapters").get<std::string>();
  return record;
}

/// Removes `before` and the number that follows it from the front of the text. Returns the number, or nothing if they are not there.
std::optional<int> take_number(std::string_view& text, std::string_view before) {
  if (!text.starts_with(before)) return std::nullopt;
  text.remove_prefix(before.size());
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || number < 0) return std::nullopt;
  text.remove_prefix(static_cast<size_t>(end - text.data()));
  return number;
}

}  // namespace

std::optional<std::pair<int, int>> rank_in_name(std::string_view name, std::string_view extension) {
  name.remove_prefix(std::min(name.rfind(kRank), name.size()));
  const auto rank = take_number(name, kRank);
  const auto ranks = rank ? take_number(name, "-of-") : std::nullopt;
  if (!ranks || *ranks == 0 || name != extension) return std::nullopt;
  return std::pair(*rank, *ranks);
}

int64_t PartRecord::numel() const {
  int64_t sum = 0;
  for (const auto& slice : slices) sum += slice.numel();
  return sum;
}

std::map<std::string, std::string> origin_here(std::string layout, std::string mesh) {
  return {{"tessera", TESSERA_VERSION}, {"libtorch", TORCH_VERSION}, {"layout", std::move(layout)}, {"mesh", std::move(mesh)}};
}

nlohmann::json to_json(const BaseRecord& base) {
  return {{"name", base.name}, {"checksum", base.checksum}, {"forms", base.forms}, {"parameters", base.parameters}};
}

BaseRecord base_from_json(const nlohmann::json& json) {
  return {.name = json.at("name"), .checksum = json.at("checksum"), .forms = json.at("forms"), .parameters = json.at("parameters")};
}

std::map<std::string, std::string> to_metadata(const RankRecord& record) {
  return {{"format", "pt"}, {kKey, to_json(record).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)}};
}

std::filesystem::path rank_file(const std::filesystem::path& folder, int rank, int ranks) {
  return folder / fmt::format("rank-{}-of-{}.safetensors", rank, ranks);
}

bool has_rank_file_name(std::string_view name) {
  return name.starts_with("rank-") && name.ends_with(".safetensors");
}

RankFile open_rank_file(const std::filesystem::path& folder, int rank, int ranks) {
  return open_rank_file(SafetensorsFile(rank_file(folder, rank, ranks)), rank, ranks);
}

RankFile open_rank_file(SafetensorsFile file, int rank, int ranks) {
  const auto text = file.metadata().find(kKey);
  if (text == file.metadata().end()) throw IoError("{} is no part of a checkpoint of Tessera", file.path());
  try {
    auto record = record_from_json(nlohmann::json::parse(text->second));
    if (record.rank != rank || record.ranks != ranks) {
      throw IoError("it was written by rank {} of {}; somebody has renamed it", record.rank, record.ranks);
    }
    for (auto* name : {&record.generator, &record.device_generator}) {
      if (!file.contains(*name)) name->clear();
    }
    const auto has_none = [&](const std::string& name) { return !file.has_checksum(name); };
    if (std::ranges::any_of(file.names(), has_none)) throw IoError("its checksums are gone");
    const auto values_of = [&](const std::string& name) {
      return file.contains(name) ? c10::multiply_integers(file.info(name).sizes) : -1;
    };
    const auto refuse = [](const std::string& name, const PartRecord& part) {
      throw IoError("it has not the {} values of '{}' that it promises", part.numel(), name);
    };
    for (const auto* parts : {&record.parts, &record.state}) {
      for (const auto& [name, part] : *parts) {
        if (values_of(name) != part.numel()) refuse(name, part);
      }
    }
    for (const auto* names : {&record.outside, &record.buffers, &record.beside, &record.by_rank}) {
      for (const auto& name : *names) file.info(name);
    }
    for (const auto* names : {&record.beside, &record.by_rank}) {
      for (const auto& name : *names) {
        if (!name.starts_with(kBesidePrefix)) throw IoError("'{}' is no name of a tensor beside the model", name);
      }
    }
    for (const auto& name : record.by_rank) {
      if (file.info(name).sizes.empty()) throw IoError("'{}' should have rows, and is one number", name);
    }
    return {std::move(file), std::move(record)};
  } catch (const UsageError& error) {
    throw UsageError("{} can't be used: {}", file.path(), error.what());
  } catch (const nlohmann::json::exception& error) {
    throw IoError("{} can't be used: {}", file.path(), fault_of(error));
  } catch (const std::exception& error) {
    throw IoError("{} can't be used: {}", file.path(), error.what());
  }
}

bool is_rank_file(const SafetensorsFile& file) {
  return file.metadata().contains(kKey);
}

void expect_same_save(const RankFile& one, const RankFile& other) {
  if (one.record.save == other.record.save) return;
  throw IoError("{} and {} come from different saves; somebody has mixed the files of two checkpoints", one.tensors.path(),
                other.tensors.path());
}

int saved_ranks(const std::filesystem::path& folder) {
  const auto names = names_in(folder);
  if (!names) throw IoError("there is no checkpoint {}", folder);
  std::map<int, std::set<int>> found;  // from the number of ranks in the file names to the ranks whose files exist
  for (const auto& name : *names) {
    const auto file = name.rfind(kRank) == 0 ? rank_in_name(name, ".safetensors") : std::nullopt;
    if (file) found[file->second].insert(file->first);
  }
  if (found.empty()) throw IoError("{} is no checkpoint: it has no file rank-0-of-N.safetensors", folder);
  if (found.size() > 1) {
    throw IoError("{} has files of several checkpoints: of {} ranks and of {}", folder, found.begin()->first, found.rbegin()->first);
  }
  const auto& [ranks, there] = *found.begin();
  const auto missing = static_cast<int64_t>(ranks) - std::ranges::distance(there.begin(), there.lower_bound(ranks));
  if (missing == 0) return ranks;
  int first = 0;
  while (there.contains(first)) first++;
  throw IoError("the checkpoint {} is incomplete: '{}' {} missing", folder, rank_file({}, first, ranks).string(),
                missing == 1 ? "is" : fmt::format("and {} more are", missing - 1));
}

}  // namespace tessera::checkpoint
