// Trains a model of the benchmarks and prints the cost of a step as one line of JSON. Trains on XLA devices (sharded if there are
// several), or by eager libtorch in one process or on one of several ranks that shard the model. bench/xla runs it.
#include <fmt/format.h>
#include <tessera/base/env.h>
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <tessera/xla/init.h>
#include <tessera/xla/metrics.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>

#include "bench.h"

namespace {

using namespace tessera;
using bench::or_else;

struct Flags : bench::TrainingFlags {
  std::string system = "xla";
  int devices = 1;
};

bench::Subject make_subject(const Flags& flags, at::ScalarType dtype) {
  torch::manual_seed(0);
  if (flags.model == "mlp") {
    const auto width = or_else(flags.width, 1024);
    return bench::classifier(models::Mlp(models::MlpOptions{.width = width, .layers = or_else(flags.layers, 12)}), {},
                             or_else(flags.batch, 512), 16, [=](int64_t count) {
                               return torch::randn({count, width}).to(dtype);
                             });
  }
  const models::GptOptions options{.width = or_else(flags.width, 512), .layers = or_else(flags.layers, 8)};
  return bench::gpt(models::Gpt(options), options, or_else(flags.batch, 4));
}

/// Milliseconds of a step.
struct Times {
  double all = 0, processor = 0;
  double tracing = 0;   // until all operators of the step are recorded
  double program = 0;   // from the start of the program until its results are ready
};

double now() {
  return 1e3 * bench::seconds_since({});
}
double processor() { return 1e3 * static_cast<double>(std::clock()) / CLOCKS_PER_SEC; }

template <class Of>
double least(const std::vector<Times>& times, const Of& of) {
  return of(*std::ranges::min_element(times, {}, of));
}

nlohmann::json run(const Flags& flags) {
  const auto dtype = flags.dtype == "bf16" ? torch::kBFloat16 : torch::kFloat;
  const bool traced = flags.system == "xla";
  const auto world = traced ? xla::init({.devices = flags.devices}) : flags.system == "ranks" ? init() : self_world();
  const auto device = world.traits().device;
  auto subject = make_subject(flags, dtype);
  subject.module->to(dtype);
  if (traced) xla::to_device(*subject.module);
  if (world.size() > 1) fully_shard(*subject.module, {.mesh = world}, wrap_classes({flags.model == "mlp" ? "Linear" : "GptBlock"}));
  optim::AdamW optimizer(parameters(*subject.module), {.lr = 1e-4});
  torch::manual_seed(1);
  std::vector<Times> times;
  double loss = 0;
  for (int step = 0; step < flags.warmup + flags.steps; step++) {
    std::vector<at::Tensor> inputs_of_ranks, targets_of_ranks;
    for (size_t rank = 0; rank < world.local_ranks().size(); rank++) {
      auto [inputs, targets] = subject.draw(subject.batch);
      inputs_of_ranks.push_back(std::move(inputs));
      targets_of_ranks.push_back(std::move(targets));
    }
    const auto begin = now(), begin_processor = processor();
    const auto value = subject.loss({world.from_replicas(inputs_of_ranks).to(device), world.from_replicas(targets_of_ranks).to(device)});
    value.backward();
    optimizer.step();
    for (const auto& parameter : optimizer.parameters()) parameter.mutable_grad() = at::Tensor();  // zero_grad() would end the step
    const auto noted = now(), starting = traced ? 1e3 * xla::metrics().seconds_starting : 0;
    if (traced) xla::step_boundary();
    const auto started = now(), in_plugin = traced ? 1e3 * xla::metrics().seconds_starting - starting : 0;
    loss = value.item<double>();
    const auto end = now();
    if (step >= flags.warmup) times.push_back({end - begin, processor() - begin_processor, noted - begin, in_plugin + end - started});
  }
  nlohmann::json row = {{"system", flags.system},
                        {"model", flags.model},
                        {"dtype", flags.dtype},
                        {"min_ms", least(times, std::mem_fn(&Times::all))},
                        {"processor_ms", least(times, std::mem_fn(&Times::processor)) * (traced ? 1 : world.size())},  // other ranks take as much
                        {"loss", loss}};
  if (traced) {
    const auto& metrics = xla::metrics();
    row["tracing_ms"] = least(times, std::mem_fn(&Times::tracing));
    row["program_ms"] = least(times, std::mem_fn(&Times::program));
    row["operators"] = metrics.operators / (flags.warmup + flags.steps);
    row["compiled"] = metrics.compiles;
    row["loaded"] = metrics.loaded_from_disk;
    row["seconds_compiling"] = metrics.seconds_compiling;
    if (metrics.peak_memory) row["peak_mb"] = static_cast<double>(*metrics.peak_memory) / 1e6;
    const auto& memory = std::ranges::max(metrics.programs, {}, [](const auto& program) { return program.memory.temporary; }).memory;
    row["temporary_mb"] = static_cast<double>(memory.temporary) / 1e6;
    row["needed_mb"] = static_cast<double>(memory.arguments + memory.outputs - memory.aliased + memory.temporary) / 1e6;
    fmt::print(stderr, "{}", xla::metrics_report());
  }
  return row;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times training steps of a model in one process, on an XLA device or by eager libtorch.", "bench_xla_train");
  Flags flags;
  app.add_option("--system", flags.system)->check(CLI::IsMember({"xla", "eager", "ranks"}))->capture_default_str();
  flags.steps = 8, flags.warmup = 3;
  flags.add_to(app, {"gpt", "mlp"});
  app.add_option("--devices", flags.devices, "Number of XLA devices, which shard the model; for --system ranks, tessera launch sets the number")
      ->check(CLI::Range(1, 1024));
  return bench::run(app, argc, argv, [&] {
    const auto row = run(flags);
    if (env("RANK").value_or("0") == "0") fmt::print("{}\n", row.dump());
  });
}
