// Trains one of the benchmarks' models on random data and says what a step takes: one line of JSON. bench/compare runs it beside the peers.
#include <ATen/autocast_mode.h>
#include <fmt/format.h>
#include <tessera/models/gpt.h>
#include <tessera/models/mlp.h>
#include <tessera/models/mnist.h>
#include <tessera/models/resnet50.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

namespace {

using namespace tessera;
using Clock = std::chrono::steady_clock;

struct Flags {
  std::string model = "mlp", dtype = "fp32", residence = "auto";
  int steps = 12, warmup = 4;
  int64_t batch = 0, width = 0, layers = 0;
  bool whole = false, in_backward = false;
};

struct Batch {
  at::Tensor inputs, targets;
};

/// A model of the benchmark: what becomes a unit, what a batch is, and its loss.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  int64_t batch = 0;
  std::function<Batch(int64_t batch)> draw;
  std::function<at::Tensor(const Batch&)> loss;
};

template <class Model, class Inputs>
Subject classifier(Model model, std::vector<std::shared_ptr<torch::nn::Module>> units, int64_t batch, int64_t classes, Inputs inputs) {
  return {
      .module = model.ptr(),
      .units = std::move(units),
      .batch = batch,
      .draw = [classes, inputs](int64_t count) { return Batch{inputs(count), torch::randint(classes, {count}, torch::kLong)}; },
      .loss =
          [model](const Batch& drawn) mutable { return torch::cross_entropy_loss(model(drawn.inputs).to(torch::kFloat), drawn.targets); }};
}

std::vector<std::shared_ptr<torch::nn::Module>> members(const torch::nn::ModuleList& list) {
  return {list->begin(), list->end()};
}

Subject make_subject(const Flags& flags) {
  torch::manual_seed(0);
  const bool narrow = flags.dtype == "bf16" && !flags.whole;
  if (flags.model == "mlp") {
    const auto width = flags.width > 0 ? flags.width : 2048;
    models::Mlp model(models::MlpOptions{.width = width, .layers = flags.layers > 0 ? flags.layers : 8});
    return classifier(model, members(model->blocks), 32, 16, [width, narrow](int64_t count) {
      return torch::randn({count, width}).to(narrow ? torch::kBFloat16 : torch::kFloat);
    });
  }
  if (flags.model == "cnn") {
    models::MnistNet model;
    return classifier(model, {model->conv1.ptr(), model->conv2.ptr(), model->fc1.ptr()}, 128, 10,
                      [](int64_t count) { return torch::randn({count, 1, 28, 28}); });
  }
  if (flags.model == "resnet50") {
    models::ResNet50 model;
    return classifier(model, members(model->blocks), 8, 1000, [](int64_t count) { return torch::randn({count, 3, 96, 96}); });
  }
  const models::GptOptions options{.width = flags.width > 0 ? flags.width : 512, .layers = flags.layers > 0 ? flags.layers : 8};
  models::Gpt model(options);
  return {.module = model.ptr(),
          .units = members(model->blocks),
          .batch = 4,
          .draw =
              [options](int64_t count) {
                const auto tokens = torch::randint(options.vocabulary, {count, options.longest + 1}, torch::kLong);
                return Batch{tokens.narrow(1, 0, options.longest), tokens.narrow(1, 1, options.longest).reshape({-1})};
              },
          .loss =
              [model, options](const Batch& drawn) mutable {
                const auto scores = model(drawn.inputs);
                return torch::cross_entropy_loss(scores.to(torch::kFloat).view({-1, options.vocabulary}), drawn.targets);
              }};
}

/// What this process takes of memory, its part of what it shares with others counted.
double own_megabytes() {
  std::ifstream file("/proc/self/smaps_rollup");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("Pss:")) return std::stod(line.substr(4)) / 1024;
  }
  return 0;
}

double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

double milliseconds(Clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(Clock::now() - begin).count();
}

uint64_t bytes_sent(const Communicator& world) {
  uint64_t all = 0;
  for (const auto operation : {Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce}) all += world.traffic(operation).bytes;
  return all;
}

int run(const Flags& flags) {
  const auto world = flags.whole ? self_world() : init();
  auto subject = make_subject(flags);
  if (!flags.whole) {
    ShardOptions options{.mesh = world};
    if (flags.dtype == "bf16") options.mixed_precision.param_dtype = torch::kBFloat16;
    if (flags.residence == "gathered") options.residence = Residence::Gathered;
    if (flags.residence == "node-shared") options.residence = Residence::NodeShared;
    for (const auto& unit : subject.units) fully_shard(unit, options);
    fully_shard(subject.module, options);
  }
  optim::AdamW optimizer(parameters(*subject.module), {.lr = 1e-4});
  if (flags.in_backward) optimizer.step_in_backward();
  const auto batch = flags.batch > 0 ? flags.batch : subject.batch;
  torch::manual_seed(1 + world.rank());
  // What a user of plain libtorch would do for lower precision.
  const bool autocast = flags.whole && flags.dtype == "bf16";
  at::autocast::set_autocast_enabled(at::kCPU, autocast);
  std::vector<double> times;
  double loss = 0;
  for (int step = 0; step < flags.warmup + flags.steps; step++) {
    const auto drawn = subject.draw(batch);
    world.barrier();
    if (step == flags.warmup) world.reset_traffic();
    const auto begin = Clock::now();
    const auto value = subject.loss(drawn);
    if (autocast) at::autocast::clear_cache();
    value.backward();
    optimizer.step();
    optimizer.zero_grad();
    world.barrier();
    if (step >= flags.warmup) times.push_back(milliseconds(begin));
    loss = value.item<double>();
    if (step == 0 && world.rank() == 0) fmt::print(stderr, "first step done\n");
  }
  const auto memory = torch::full({1}, own_megabytes(), torch::kDouble);
  world.all_reduce(memory).wait();
  if (world.rank() == 0) {
    const nlohmann::json row = {{"system", flags.whole ? "libtorch" : "tessera"},
                                {"model", flags.model},
                                {"dtype", flags.dtype},
                                {"world", world.size()},
                                {"median_ms", median(times)},
                                {"min_ms", std::ranges::min(times)},
                                {"pss_mb", memory.item<double>()},
                                {"bytes_per_step", bytes_sent(world) / static_cast<uint64_t>(std::max(1, flags.steps))},
                                {"loss", loss}};
    fmt::print("{}\n", row.dump());
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times training steps of a model, sharded over the ranks that tessera launch or torchrun have started.", "bench_train");
  Flags flags;
  app.add_option("--model", flags.model)->check(CLI::IsMember({"gpt", "mlp", "cnn", "resnet50"}))->capture_default_str();
  app.add_option("--dtype", flags.dtype)->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
  app.add_option("--residence", flags.residence)->check(CLI::IsMember({"auto", "gathered", "node-shared"}))->capture_default_str();
  app.add_option("--steps", flags.steps)->check(CLI::Range(1, 100'000))->capture_default_str();
  app.add_option("--warmup", flags.warmup)->check(CLI::Range(0, 100'000))->capture_default_str();
  app.add_option("--batch", flags.batch, "Samples per rank and step; the model's own unless given")->check(CLI::Range(1, 1'000'000));
  app.add_option("--width", flags.width, "Of mlp and gpt")->check(CLI::Range(1, 1'000'000));
  app.add_option("--layers", flags.layers, "Of mlp and gpt")->check(CLI::Range(1, 10'000));
  app.add_flag("--whole", flags.whole, "One process, not sharded");
  app.add_flag("--step-in-backward", flags.in_backward, "Update each unit while backward runs")->excludes("--whole");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(flags);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_train: {}\n", error.what());
    return 1;
  }
}
