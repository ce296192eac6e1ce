// Runs what has been traced: one program for all that lives, compiled once for each shape of step.
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
  /// More programs than a training with evaluation and batches of many sizes has. Each takes memory, also on the device.
  static constexpr size_t kManyPrograms = 256;

  /// Without a client programs are traced, and not run. Of more programs than so many, the one that has not run for longest is dropped.
  ProgramRunner(std::optional<pjrt::Client> client, int replicas, size_t many_programs = kManyPrograms);

  /// Such as "cpu". Where programs are only traced, what TESSERA_PJRT_PLUGIN says they are for, or "no device".
  const std::string& platform() const { return platform_; }
  bool runs() const { return client_.has_value(); }
  int replicas() const { return replicas_; }

  /// Starts one program that computes all that storages hold and has not been computed. Afterwards each storage holds buffers.
  /// `reader` is what on the host asks for a value, such as "item()", or empty if it needs no mention; at the end of a step there is none.
  void cut(const std::optional<std::string>& reader = {});
  /// Computes one value beside: storages stay as they are.
  std::shared_ptr<const Data> compute(const Value& value);

  /// A tensor of the CPU for each replica, or one for all.
  std::shared_ptr<const Data> upload(const std::vector<at::Tensor>& tensors);
  at::Tensor download(const pjrt::Buffer& buffer);

  /// Until no program runs any more.
  void wait();
  /// At the end of the process: leaves what TESSERA_XLA_PROGRAMS asks for.
  void finish();
  /// One more operator is traced. Warns once if what waits to be computed has grown beyond what a step may be.
  void note_operator();

  Metrics& metrics() { return metrics_; }
  /// Of the device that has taken most.
  std::optional<int64_t> peak_memory() const;
  /// Of the last program: StableHLO.
  const std::string& last_text() const { return last_text_; }

 private:
  struct Compiled {
    std::optional<pjrt::Executable> executable;  // of programs that run
    size_t number;                               // in the metrics
    int64_t last_run = 0;                        // among all executions
  };

  /// Of all steps with one key.
  struct Known {
    MovingNumbers numbers;
    std::optional<Compiled> program;  // with the numbers as arguments that have moved until now
  };

  std::vector<std::shared_ptr<const Data>> run(StepProgram& step);
  /// One list for each replica.
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
  std::vector<std::shared_ptr<const Data>> donated_;  // to the program that was started last
  std::vector<pjrt::Buffer> under_way_;               // of programs that may still run: the smallest result of each replica
  size_t last_number_ = 0;                            // in the metrics, of the program that was started last
  std::optional<size_t> replaced_;                    // the number of the one in whose place it is
  bool traces_backward_ = false;                      // whether a backward pass is in what waits to be computed
  bool has_warned_of_growth_ = false;
  StepHistory history_;
  std::string last_text_;
  struct Read {
    std::string reader;
    std::vector<std::weak_ptr<const Data>> results;  // of its program
  };
  std::vector<Read> reads_in_step_;
  Metrics metrics_;
};

}  // namespace tessera::xla
