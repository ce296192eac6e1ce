// Record: the last things that a rank has done. Reports about ranks that hang, log lines of units, counters and traces are made from it.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_set>
#include <utility>
#include <vector>

#include "tessera/base/no_copy.h"
#include "tessera/comm/operation.h"

namespace tessera {

struct Envelope;
struct UnitFigures;

using ModelUnits = std::shared_ptr<const std::vector<UnitFigures>>;  // another one when the units of the model change
/// The figures of all models of a rank, for the files of a run.
struct ModelFigures {
  std::vector<ModelUnits> models;
  std::map<std::string, uint64_t> memory;    // bytes by kind; `unsharded` is a peak
  std::map<std::string, uint64_t> counters;  // as ModelCounters has them
};

/// Seconds of the program's thread, each counted once, in some steps.
struct StepTimes {
  uint64_t steps = 0;
  double compute = 0, unshard = 0, reduce = 0, optimizer = 0, other = 0;
};

/// The kinds of entries. Unshard and Reduce are waits of the program's thread.
enum class Activity : uint8_t { Pass, Unit, Unshard, Reduce, Optimizer, Operation, Memory };
/// As traces call it: "unshard", and "collective" for an operation.
std::string_view name(Activity activity);

/// The phase in which shards change. It belongs to no pass.
inline constexpr std::string_view kWriting = "a write to the shards";

/// All groups of a rank share one Record, a ring of its last entries. Threads may use it at the same time. A call takes about 0.1 us, and
/// enter() each 10 ms some more.
class Record : NoCopy {
 public:
  enum class Outcome : uint8_t { Running, Done, Failed };
  struct Entry {
    double began, ended;              // of seconds_now()
    const std::string *name, *phase;  // of the unit and of the pass, or null; the record keeps the texts
    uint64_t group, sequence, bytes;
    Activity activity;
    Operation operation;
    Outcome outcome;
  };
  struct Snapshot {
    std::vector<Entry> entries;                             // the oldest first
    std::vector<std::pair<Entry, std::string>> operations;  // the last ones, with their descriptions
    std::string place;                                      // place()
    bool is_inside = false;                                 // whether the program is still there for certain
    double entered = 0, now = 0;
    double to_unix = 0;  // what a time of an entry lacks to unix time
  };

  Record();
  ~Record();

  /// Records where the program is: "backward" of unit "layers.3". An empty phase says that the previous phase has ended.
  void enter(std::string_view phase, std::string_view unit);
  /// Records that a wait or an optimizer's step begins. An optimizer that names a unit steps in backward. Returns the entry for end().
  uint64_t begin(Activity activity, std::string_view unit);
  /// Records that an operation of a group begins. `group` is the same number on all ranks of the group.
  uint64_t begin(uint64_t group, const Envelope& envelope);
  void end(uint64_t entry, Outcome outcome = Outcome::Done);
  void note_memory(std::string_view kind, uint64_t bytes);
  /// Notes that units take more or less memory beyond their shards.
  void add_unsharded(int64_t bytes) {
    if (bytes != 0) note_memory("unsharded", static_cast<uint64_t>(unsharded_ += bytes));
  }

  /// Adds an optimizer, or memory of its state. Steps of training are counted by the optimizer that steps first, or where Tessera has none,
  /// by the backward passes of one model.
  void add_optimizer(const void* optimizer, uint64_t bytes = 0);
  void remove_optimizer(const void* optimizer);
  void end_step(const void* optimizer);
  void end_backward(const void* model);

  /// Adds a model. `count` adds its figures, or returns false when the model is gone.
  void add_model(std::function<bool(ModelFigures&)> count);
  ModelFigures figures();
  /// `act` runs in the thread that ends a step.
  void on_step(std::function<void()> act) { on_step_ = std::move(act); }

  /// The times since the last call.
  StepTimes take_times();
  /// Where the program is: "backward of 'layers.3'".
  std::string place() const;
  Snapshot snapshot() const;

  /// Set by tessera::init before other threads use the record.
  int rank = 0;
  std::string host = {};
  std::string run = {};  // the folder of the run; empty unless the run is recorded

 private:
  struct Hash {
    using is_transparent = void;
    size_t operator()(std::string_view text) const { return std::hash<std::string_view>()(text); }
  };
  struct Details;
  struct Open {
    uint64_t entry;
    Activity activity;
  };

  // The caller of these functions holds the lock.
  const std::string* kept(std::string_view text);
  Entry& add(Activity activity, double now, std::string_view name);
  uint64_t open(Activity activity, double now, std::string_view name);
  void close(uint64_t number, double now, Outcome outcome);
  void leave(Activity activity, double now);
  void spend(double now);
  void tell(const Entry& entry) const;
  std::string place_now() const;

  mutable std::mutex mutex_;
  const std::unique_ptr<Entry[]> ring_;
  uint64_t count_ = 0;  // number of entries so far; the ring has the last of them
  std::vector<Details> details_;  // of the last operations
  uint64_t operations_ = 0;
  std::unordered_set<std::string, Hash, std::equal_to<>> names_;
  std::string phase_, unit_;  // see place()
  bool is_inside_ = false;
  double entered_ = 0;
  const double to_unix_;
  const std::string* pass_ = nullptr;  // the name of the pass that is open
  std::vector<Open> open_;             // the innermost last
  StepTimes times_;
  double since_ = 0;    // until when times_ counts; 0 before the first pass
  double sampled_ = 0;  // when the memory of the process was noted last
  std::atomic<int64_t> unsharded_ = 0;
  std::map<const void*, uint64_t> optimizers_;  // with the bytes of their states
  uint64_t steps_ = 0;
  const void* counts_steps_ = nullptr;
  std::function<void()> on_step_;
  std::mutex models_mutex_;
  std::vector<std::function<bool(ModelFigures&)>> models_;
};

/// The memory of this process in bytes. Memory that ranks share counts fully.
uint64_t resident_bytes();

}  // namespace tessera
