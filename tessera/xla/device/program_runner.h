// Runs what has been traced: one program for all that lives, compiled once for each shape of step.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "tessera/xla/graph/step_program.h"
#include "tessera/xla/metrics.h"
#include "tessera/xla/pjrt/program_cache.h"

namespace tessera::xla {

class ProgramRunner {
 public:
  ProgramRunner(pjrt::Client client, int replicas) : client_(std::move(client)), replicas_(replicas), disk_(pjrt::ProgramCache::of_this_user()) {}

  const pjrt::Client& client() const { return client_; }
  int replicas() const { return replicas_; }

  /// Starts one program that computes all that storages hold and has not been computed. Afterwards each storage holds buffers.
  void cut();
  /// Computes one value beside: storages stay as they are.
  std::shared_ptr<const Data> compute(const Value& value);

  /// A tensor of the CPU for each replica, or one for all.
  std::shared_ptr<const Data> upload(const std::vector<at::Tensor>& tensors);
  std::vector<at::Tensor> download(const Data& data);

  Metrics& metrics() { return metrics_; }
  /// Of the last program: StableHLO.
  const std::string& last_text() const { return last_text_; }

 private:
  std::vector<std::shared_ptr<const Data>> run(const StepProgram& step);
  const pjrt::Executable& compiled(const StepProgram& step);

  pjrt::Client client_;
  int replicas_;
  std::optional<pjrt::ProgramCache> disk_;
  std::unordered_map<std::string, pjrt::Executable> programs_;
  std::string last_text_;
  Metrics metrics_;
};

}  // namespace tessera::xla
