// The picture that `tessera top` shows of a run, as text.
#pragma once

#include <string>

#include "tessera/cli/report/run_files.h"
#include "tessera/train/display.h"

namespace tessera::cli::reports {

struct TopView {
  int columns = 100, rows = 40;
  train::Glyphs glyphs = train::Glyphs::Ascii;
};

/// Lines of at most `columns` columns: the run, the curve of its loss, and a row for each rank. If there are more ranks than rows, the ones
/// that make others wait are the first. `now` is unix time.
std::string top_frame(const RecordedRun& run, double now, const TopView& view);

}  // namespace tessera::cli::reports
