// The table of formats, from which readers, writers and the command line take all properties of a format. To add a format, add a row and a
// name in `Format`.
#pragma once

#include <algorithm>
#include <filesystem>
#include <span>
#include <string_view>
#include <vector>

#include "tessera/checkpoint/format.h"

namespace tessera::checkpoint {

struct Catalog;
class RunSource;

struct FormatRow {
  Format format;
  std::string_view flag;                       // of `tessera ckpt convert`: "dcp"
  std::string_view name;                       // for people: "a folder of torch.distributed.checkpoint"
  std::vector<std::string_view> endings = {};  // of its files; none if the format is a folder or files with a common prefix
  /// Whether a folder is of the format, as far as file names tell. The first row that returns true wins.
  bool (*is_folder)(const std::filesystem::path& folder) = nullptr;
  bool model_alone = false;                    // it has no place for an optimizer, notes or extra tensors
  bool takes_extra = true;                     // it has a place for extra tensors outside the model
  std::vector<std::string_view> options = {};  // the conversion options, of those for some formats only, that apply to it
  Catalog (*read)(const std::filesystem::path& path);
  /// Writes the run to `out`, and returns its files or the folder. Collective.
  std::vector<std::filesystem::path> (*write)(const RunSource& source, const std::filesystem::path& out) = nullptr;
  std::string_view unwritten = {};  // the error of writing a format that is only read
  std::string_view package = {};    // the package with which `tessera ckpt convert` writes it nevertheless

  /// Whether the name has one of the endings.
  bool has_ending(const std::filesystem::path& path) const { return std::ranges::count(endings, path.extension().native()) > 0; }
  /// Whether `options` has this option.
  bool takes(std::string_view option) const { return std::ranges::count(options, option) > 0; }
};

std::span<const FormatRow> format_rows();
const FormatRow& row_of(Format format);

}  // namespace tessera::checkpoint
