#include "tessera/checkpoint/stored/rank_file.h"

#include <fmt/format.h>
#include <torch/version.h>

#include <algorithm>
#include <charconv>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/numel.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/formats/json_fault.h"
#include "tessera/version.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kKey = "tessera";
constexpr std::string_view kRank = "rank-";
constexpr int kRankFormat = 3;

void expect_sense(const PartRecord& part) {
  if (part.strides.size() != part.shape.size()) throw IoError("it does not have one stride for each dimension");
  auto left = checked_numel(part.shape);
  if (!left) throw IoError("no tensor can have the shape [{}]", joined(part.shape));
  for (const auto& slice : part.slices) {
    if (!slice.fits()) throw IoError("it has a slice that does not fit into its shape");
    *left -= slice.numel();
    if (*left < 0) throw IoError("its slices have more values than its shape");
  }
}

RankRecord record_from_json(const nlohmann::json& json) {
  if (const auto format = json.at("format").get<int>(); format != kRankFormat)
    throw UsageError("its format is {}, this version of Tessera reads {}; load it with the version that wrote it", format, kRankFormat);
  auto record = json.get<RankRecord>();
  for (const auto* parts : {&record.parts, &record.state}) {
    for (const auto& [name, part] : *parts) {
      try {
        expect_sense(part);
      } catch (const Error& error) {
        throw IoError("the place of '{}' makes no sense: {}", name, error.what());
      }
    }
  }
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

void to_json(nlohmann::json& json, const PartRecord& part) {
  auto slices = nlohmann::json::array();
  for (const auto& slice : part.slices) slices.push_back({{"offsets", slice.offsets}, {"sizes", slice.sizes}});
  json = {{"shape", part.shape}, {"strides", part.strides}, {"slices", std::move(slices)}};
}

void from_json(const nlohmann::json& json, PartRecord& part) {
  part = {.shape = json.at("shape"), .strides = json.at("strides"), .slices = {}};
  for (const auto& slice : json.at("slices"))
    part.slices.push_back({.shape = part.shape, .offsets = slice.at("offsets"), .sizes = slice.at("sizes")});
}

std::map<std::string, std::string> to_metadata(const RankRecord& record) {
  nlohmann::json json = record;
  json["format"] = kRankFormat;
  return {{"format", "pt"}, {kKey, json.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)}};
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
  if (text == file.metadata().end()) throw IoError("{} is not a part of a checkpoint of Tessera", file.path());
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
      throw IoError("it does not have the {} values of '{}' that its header lists", part.numel(), name);
    };
    for (const auto* parts : {&record.parts, &record.state}) {
      for (const auto& [name, part] : *parts) {
        if (values_of(name) != part.numel()) refuse(name, part);
      }
    }
    for (const auto* names : {&record.whole, &record.buffers, &record.beside, &record.by_rank}) {
      for (const auto& name : *names) file.info(name);
    }
    for (const auto* names : {&record.beside, &record.by_rank}) {
      for (const auto& name : *names) {
        if (!name.starts_with(kBesidePrefix)) throw IoError("'{}' is not a name of an extra tensor", name);
      }
    }
    for (const auto& name : record.by_rank) {
      if (file.info(name).sizes.empty()) throw IoError("'{}' should have rows, but is one number", name);
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
  if (found.empty()) throw IoError("{} is not a checkpoint: it has no file rank-0-of-N.safetensors", folder);
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
