// FlightRecorder: the last operations of a rank, and where its program is, to find out why a job hangs.
#pragma once

#include <array>
#include <chrono>
#include <map>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/comm/control/envelope.h"

namespace tessera {

/// All groups of a rank share one FlightRecorder. Threads may use it at the same time. Recording allocates no memory.
class FlightRecorder {
 public:
  using Clock = std::chrono::steady_clock;

  /// Records where the program is: "backward" of unit "layers.3". An empty phase says that the previous phase has ended.
  void enter(std::string_view phase, std::string_view unit);
  /// Records that an operation of a group begins. `group` is the same number on all ranks of the group. Returns the operation for end().
  uint64_t begin(uint64_t group, const Envelope& envelope);
  enum class Outcome { Running, Done, Failed };
  void end(uint64_t operation, Outcome outcome);

  /// All records as JSON, for flight_report() of another rank. Times are counted back from the call.
  std::string to_json() const;

 private:
  using Time = Clock::time_point;
  struct Operation {
    uint64_t group = 0;
    Envelope envelope = {};
    Time began = {}, ended = {};
    Outcome outcome = Outcome::Done;
  };

  mutable std::mutex mutex_;
  std::array<Operation, 32> ring_;
  uint64_t begun_ = 0;  // number of operations so far; the ring has the last of them
  FixedText<32> phase_;
  FixedText<80> unit_;      // only the end of a longer name
  bool is_inside_ = false;  // whether the program is still in the phase for certain; otherwise it may have left it
  Time entered_ = {};
};

/// Combines the records of the ranks, each from to_json(), in one text: where each rank is, at which operation they differ, and the last
/// operations of each. `ranks` lacks the ranks that have not answered.
std::string flight_report(const std::map<int, std::string>& ranks, int world_size);

/// The ranks that have not reached this operation of a group according to their recorders, or that have not answered.
std::vector<int> not_come(const std::map<int, std::string>& answers, uint64_t group, uint64_t sequence, std::span<const int> ranks);

}  // namespace tessera
