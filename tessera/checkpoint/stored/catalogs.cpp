#include "tessera/checkpoint/stored/catalogs.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/storage.h"
#include "tessera/checkpoint/format_table.h"
#include "tessera/checkpoint/formats/gguf/gguf.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::checkpoint {
namespace {

namespace fs = std::filesystem;

/// Returns the format of a folder, judging by the names of its files.
std::optional<Format> format_of_folder(const fs::path& folder) {
  for (const auto& row : format_rows()) {
    if (row.is_folder && row.is_folder(folder)) return row.format;
  }
  const auto names = names_in(folder).value_or(std::vector<std::string>());
  return std::ranges::any_of(names, has_rank_file_name) ? std::optional(Format::Tessera) : std::nullopt;  // the folder has no manifest
}

/// Returns a hint for people who give the folder that their checkpoints are in.
std::string what_is_in(const fs::path& folder) {
  std::vector<std::string> found;
  for (const auto& name : names_in(folder).value_or(std::vector<std::string>())) {
    if (is_folder(folder / name) && format_of_folder(folder / name)) found.push_back((folder / name).string());
  }
  if (found.empty()) return "";
  return fmt::format("; did you mean {}?", fmt::join(found, " or "));
}

/// Returns a hint for people who give the prefix of a run instead of a checkpoint.
std::string newest_of_run(const fs::path& prefix) {
  const auto folders = prefix.has_filename() ? step_folders(prefix) : std::vector<StepFolder>();
  return folders.empty() ? "" : fmt::format("; did you mean {}?", folders.back().folder.string());
}

/// Throws IoError, which names the files that are read.
[[noreturn]] void refuse_format_of(const fs::path& file) {
  std::vector<std::string> files;
  for (const auto& row : format_rows()) {
    if (!row.endings.empty()) files.push_back(fmt::format("{} ({})", row.name, fmt::join(row.endings, ", ")));
  }
  throw IoError("{} is not a checkpoint: it is not {}", file, joined(files, ", not "));
}

/// Throws UsageError if the file is a part of a checkpoint; the error says which folder to give.
void expect_no_part(const fs::path& file) {
  const auto folder = file.has_parent_path() ? file.parent_path() : fs::path(".");
  if (!is_part(file) || !format_of_folder(folder)) return;
  throw UsageError("{} is a part of a checkpoint; give its folder, {}", file, folder);
}

}  // namespace

bool is_part(const fs::path& file) {
  const auto name = file.filename().string();
  return name == ".metadata" || name == kManifestFile || name == kHubSafetensors.index || name == kHubTorch.index ||
         file.extension() == ".distcp" || has_rank_file_name(name);
}

Format format_of(const fs::path& path) {
  const bool in_folder = is_folder(path) || (object_path(path) && is_there(path / kManifestFile));  // a store may list new files late
  if (in_folder) {
    if (const auto format = format_of_folder(path)) return *format;
  }
  if (in_folder || !is_there(path)) {
    if (!torch_xla_files(path).empty()) return Format::TorchXla;
    if (!in_folder) throw IoError("there is no checkpoint {}{}", path, newest_of_run(path));
    if (is_there(path / kAdapterConfig))
      throw UsageError("{} is an adapter; `tessera ckpt merge-adapter MODEL {} OUT` makes a model with it", path, path);
    throw IoError("{} is not a checkpoint: it has no {}, no .metadata and no model.safetensors{}", path, kManifestFile, what_is_in(path));
  }
  expect_no_part(path);
  const InputFile file(path);
  if (is_gguf_file(path)) return Format::Gguf;
  char begin[9] = {};  // of a safetensors file: the length of the header, and the brace with which the header begins
  if (file.size() >= sizeof begin) file.read(begin, sizeof begin, 0);
  const bool is_pickle = row_of(Format::Torch).has_ending(path) || path.extension() == ".tar";
  const bool is_zip = begin[0] == 'P' && begin[1] == 'K';
  if (!is_pickle && !is_zip) {
    if (begin[8] != '{' && !row_of(Format::Safetensors).has_ending(path)) refuse_format_of(path);
    return Format::Safetensors;
  }
  return is_torch_xla_file(path) ? Format::TorchXla : Format::Torch;
}

Catalog read_catalog(const fs::path& path) {
  return row_of(format_of(path)).read(path);
}

int64_t steps_of_optimizer(const fs::path& path) {
  const CatalogReader stored(read_catalog(path));
  double most = 0;
  const auto is_count = [](const std::string& name) { return name.starts_with(kOptimizerPrefix) && name.ends_with(".step"); };
  for (const auto& [name, tensor] : stored.catalog().tensors) {
    if (is_count(name) && c10::multiply_integers(tensor.shape) == 1)
      most = std::max(most, stored.read(name).to(at::kDouble).item<double>());
  }
  for (const auto& [name, value] : stored.catalog().values) {
    if (is_count(name) && value.is_number()) most = std::max(most, value.get<double>());
  }
  return static_cast<int64_t>(most);
}

Catalog read_model(const fs::path& path, const ModelNames& names) {
  const auto format = format_of(path);
  if (format == Format::TorchXla) return read_torch_xla(path, TorchXlaContent::Model);
  auto run = read_run(path, names);
  for (const auto& name : names_beside(run)) run.catalog.left_out.emplace(name, kStandsBeside);
  std::erase_if(run.catalog.tensors, [&](const auto& entry) { return !is_of_model(entry.first, run); });
  if (format == Format::Tessera) {  // in this format, checksums have the names of tensors
    std::erase_if(run.catalog.checksums, [&](const StoredChecksum& bytes) { return !is_of_model(bytes.name, run); });
  }
  return std::move(run.catalog);
}

}  // namespace tessera::checkpoint
