// Compiles and runs traced steps. Each step becomes a program that computes the values of all living storages; steps with equal StepProgram
// keys share a compiled program.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/xla/device/program_folder.h"
#include "tessera/xla/graph/difference.h"
#include "tessera/xla/graph/moving_numbers.h"
#include "tessera/xla/graph/step_program.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/program_cache.h"

namespace tessera::xla {

class ProgramRunner {
 public:
  /// The default limit of compiled programs: more than training needs with evaluation and batches of many sizes. Each program takes memory,
  /// also on the device.
  static constexpr size_t kManyPrograms = 256;

  /// Without a client, programs are traced and not run. If there are more than `many_programs` programs, drops the one that has not run for
  /// the longest time.
  ProgramRunner(std::optional<pjrt::Client> client, int replicas, size_t many_programs = kManyPrograms);

  /// The kind of devices, such as "cpu". If programs are only traced, the value of TESSERA_PJRT_PLUGIN, or "no device".
  const std::string& platform() const { return platform_; }
  bool runs() const { return client_.has_value(); }
  int replicas() const { return replicas_; }

  /// Starts one program that computes all pending values of storages; afterwards each storage holds buffers. `reader` names the host's read
  /// that needs a value, such as "item()". It is empty if no warning shall name the read, and nullopt at the end of a step.
  void cut(const std::optional<std::string>& reader = {});
  /// Computes one value in a program of its own; storages stay as they are.
  std::shared_ptr<const Data> compute(const Value& value);

  /// Uploads one CPU tensor for each replica, or one tensor for all replicas.
  std::shared_ptr<const Data> upload(const std::vector<at::Tensor>& tensors);
  at::Tensor download(const pjrt::Buffer& buffer);

  /// Waits until no program runs.
  void wait();
  /// Waits, and writes the files of TESSERA_XLA_PROGRAMS, at the end of the process.
  void finish();
  /// Counts a traced operator. Warns once if more operations are pending than a step may have.
  void note_operator();

  Metrics& metrics() { return metrics_; }
  /// The peak of bytes in use on the device that has used most; nothing if the plugin does not report it.
  std::optional<int64_t> peak_memory() const;
  /// The StableHLO text of the program that was compiled last.
  const std::string& last_text() const { return last_text_; }

 private:
  struct Compiled {
    std::optional<pjrt::Executable> executable;  // nothing if programs do not run
    size_t number;                               // its index in Metrics::programs
    int64_t last_run = 0;                        // Metrics::executions just before its last execution
  };

  /// The program of all steps with one key, and which of their numbers have changed.
  struct Known {
    MovingNumbers numbers;
    std::optional<Compiled> program;  // takes the marked numbers as arguments
  };

  std::vector<std::shared_ptr<const Data>> run(StepProgram& step);
  /// Starts the program, and returns one list of results for each replica.
  std::vector<std::vector<pjrt::Buffer>> results_of(const StepProgram& step, const pjrt::Executable& executable);
  const Compiled& compiled(StepProgram& step);
  Compiled compile(const StepProgram& step);
  void drop(std::optional<Compiled>& program);
  void drop_what_nobody_runs();
  std::shared_ptr<const Data> absent(const Type& type) const;
  void note_cuts(const StepProgram& step);
  void note_read(const std::optional<std::string>& reader, const std::vector<std::shared_ptr<const Data>>& results);
  void note_step(bool is_new);

  std::optional<pjrt::Client> client_;
  std::string platform_;
  int replicas_;
  size_t many_programs_;
  std::optional<pjrt::ProgramCache> disk_;
  std::optional<ProgramFolder> folder_;
  std::unordered_map<std::string, Known> programs_;
  std::vector<std::shared_ptr<const Data>> donated_;  // arguments that were donated to the program that was started last
  std::vector<pjrt::Buffer> under_way_;               // the smallest result on each replica of every program that may still run
  size_t last_number_ = 0;                            // the index in Metrics::programs of the program that was started last
  std::optional<size_t> replaced_;                    // the index of the dropped program that the current step's program replaces
  bool traces_backward_ = false;                      // whether a backward pass traced some of the pending operations
  bool has_warned_of_growth_ = false;
  StepHistory history_;
  std::string last_text_;
  struct Read {
    std::string reader;
    std::vector<std::weak_ptr<const Data>> results;  // new results of the program that the read started
  };
  std::vector<Read> reads_in_step_;
  Metrics metrics_;
};

}  // namespace tessera::xla
