// The flight report: what the records of all ranks say about a job that hangs.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/record.h"

namespace tessera {

/// The last operations of a rank and where its program is, as JSON for flight_report() of another rank. Times are counted back from the
/// snapshot. `trace`: words that say where the rank has written its trace, or why it could not; empty if nobody has asked for it.
std::string flight_answer(const Record::Snapshot& snapshot, const std::string& trace = {});

/// Combines the answers of the ranks in one text: where each rank is, at which operation they differ, and the last operations of each.
/// `ranks` lacks the ranks that have not answered.
std::string flight_report(const std::map<int, std::string>& ranks, int world_size);

/// The ranks that have not reached this operation of a group according to their answers, or that have not answered.
std::vector<int> not_come(const std::map<int, std::string>& answers, uint64_t group, uint64_t sequence, std::span<const int> ranks);

}  // namespace tessera
