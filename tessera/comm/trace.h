// Traces of a rank's record in Chrome's format, which Perfetto shows.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/comm/record.h"

namespace tessera {

/// The events of what the record still has, from the unix time `from` on, as JSON without the brackets of the list. Times count from the unix
/// time `base`. The process is the rank, thread 0 the program's, and further threads are those of groups.
std::string trace_events(const Record& record, double base, double from = 0);

/// The path of trace-R.json in the folder of the run, or in tessera-trace/.
std::filesystem::path trace_path(const Record& record);
/// Writes the trace of the record there. Throws IoError.
void write_trace(const Record& record);

}  // namespace tessera
