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
#include "tessera/xla/graph/step_program.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/program_cache.h"

namespace tessera::xla {

class ProgramRunner {
 public:
  /// Without a client programs are traced, and not run.
  ProgramRunner(std::optional<pjrt::Client> client, int replicas);

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
  };

  std::vector<std::shared_ptr<const Data>> run(const StepProgram& step);
  /// One list for each replica.
  std::vector<std::vector<pjrt::Buffer>> results_of(const StepProgram& step, const pjrt::Executable& executable);
  const Compiled& compiled(const StepProgram& step);
  std::shared_ptr<const Data> absent(const Type& type) const;
  void note_cuts(const StepProgram& step);
  void note_read(const std::optional<std::string>& reader, const std::vector<std::shared_ptr<const Data>>& results);
  void warn_of_another_program();

  std::optional<pjrt::Client> client_;
  std::string platform_;
  int replicas_;
  std::optional<pjrt::ProgramCache> disk_;
  std::optional<ProgramFolder> folder_;
  std::unordered_map<std::string, Compiled> programs_;
  std::vector<std::shared_ptr<const Data>> donated_;  // to the program that was started last
  std::vector<pjrt::Buffer> under_way_;               // of programs that may still run: the smallest result of each replica
  size_t last_number_ = 0;        // in the metrics, of the program that was started last
  bool traces_backward_ = false;  // whether a backward pass is in what waits to be computed
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
