// The picture that `tessera top` shows of a run, as text.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/cli/report/run_files.h"
#include "tessera/train/display.h"

namespace tessera::cli {

enum class Colours { Off, On };

struct TopView {
  int columns = 100, rows = 40;
  train::Glyphs glyphs = train::Glyphs::Ascii;
  Colours colours = Colours::Off;
};

/// Reads a run, but of long files only the ends, and no traces. Leaves lines out that are not whole. Throws ConfigError if the folder has no
/// run.json of a recorded run, and other errors if files change meanwhile.
RecordedRun read_ends(const std::filesystem::path& folder);

/// Lines of at most `columns` columns: the run, the curve of its loss, and a row for each rank. If there are more ranks than rows, the ones
/// that make others wait are the first. `now` is unix time.
std::string top_frame(const RecordedRun& run, double now, const TopView& view);

}  // namespace tessera::cli
