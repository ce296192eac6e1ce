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
  std::string_view flag;                       // value of --to in `tessera ckpt convert`: "dcp"
  std::string_view name;                       // for people: "a folder of torch.distributed.checkpoint"
  std::vector<std::string_view> endings = {};  // extensions of its files; empty for folders and for files with a common prefix
  /// Whether a folder contains files with this format's names. The first row that returns true determines the format of the folder.
  bool (*is_folder)(const std::filesystem::path& folder) = nullptr;
  bool model_alone = false;                    // whether the format has no place for an optimizer, notes or extra tensors
  bool takes_extra = true;                     // whether the format has a place for extra tensors outside the model
  std::vector<std::string_view> options = {};  // which of the options that only some formats take apply to this format
  Catalog (*read)(const std::filesystem::path& path);
  /// Writes the run to `out`, and returns the written files or their folder. Collective.
  std::vector<std::filesystem::path> (*write)(const RunSource& source, const std::filesystem::path& out) = nullptr;
  std::string_view unwritten = {};  // the error message for writing a format that Tessera only reads
  std::string_view package = {};    // the package that lets `tessera ckpt convert` write such a format

  /// Whether the name has one of the endings.
  bool has_ending(const std::filesystem::path& path) const { return std::ranges::count(endings, path.extension().native()) > 0; }
  /// Whether `options` has this option.
  bool takes(std::string_view option) const { return std::ranges::count(options, option) > 0; }
};

std::span<const FormatRow> format_rows();
const FormatRow& row_of(Format format);

}  // namespace tessera::checkpoint
