// The files that a rank leaves in the folder of TESSERA_RECORD: facts about the run, a line each second, and the trace.
#pragma once

#include <c10/core/DeviceType.h>

#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace tessera {

class Communicator;
class Record;

/// Merges the members of an object into run.json: {{"flops_per_step", 1e12}, {"peak_flops", 2e14}}. Only the rank that writes the file does
/// something, and only if the run of this world is recorded. Throws UsageError if `facts` is not an object.
void record_facts(const Communicator& world, const nlohmann::json& facts);

struct RunStart {
  int rank = 0;
  std::string engine;
  c10::DeviceType device = c10::kCPU;
  std::vector<std::string> hosts;  // of each rank, as host_id() names them
};
/// Names the record. If TESSERA_RECORD is set and this is the first world of the process, writes the files until the process ends. Throws
/// IoError if the folder can't be written, and ConfigError if it has a finished run or another one, or a job that runs records in it.
void start_run(const std::shared_ptr<Record>& record, const RunStart& start);

/// The record of the first world of this process; null before there is one.
std::shared_ptr<Record> first_record();

}  // namespace tessera
