// Helpers of all benchmarks: clocks, memory, models with their batches, and run(), which main functions end with.
#pragma once

#include <fmt/format.h>
#include <tessera/base/no_copy.h>
#include <tessera/comm/communicator.h>
#include <tessera/models/gpt.h>
#include <tessera/shard/options.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace bench {

using Clock = std::chrono::steady_clock;

inline double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

inline double seconds_of(const auto& act) {
  const auto begin = Clock::now();
  act();
  return seconds_since(begin);
}

inline double best_of(int times, const auto& act) {
  double best = seconds_of(act);
  for (int i = 1; i < times; i++) best = std::min(best, seconds_of(act));
  return best;
}

inline double median(std::vector<double> values) {
  std::ranges::nth_element(values, values.begin() + std::ssize(values) / 2);
  return values[values.size() / 2];
}

inline double over_ranks(const tessera::Communicator& world, double value, tessera::Reduce op, c10::Device device = at::kCPU) {
  const auto all = torch::full({1}, value, torch::dtype(torch::kDouble).device(device));
  world.all_reduce(all, {.op = op}).wait();
  return all.item<double>();
}

/// Seconds that the slowest rank takes.
inline double seconds_of_slowest(const tessera::Communicator& world, const auto& act) {
  world.barrier();
  return over_ranks(world, seconds_of(act), tessera::Reduce::Max);
}

/// This process's memory in MB, with its share of shared memory (PSS): the sum of some lines of the kernel's.
inline double own_megabytes(const std::vector<std::string>& kinds = {"Pss:"}) {
  std::ifstream file("/proc/self/smaps_rollup");
  double sum = 0;
  for (std::string line; std::getline(file, line);) {
    for (const auto& kind : kinds) {
      if (line.starts_with(kind)) sum += std::stod(line.substr(kind.size())) * 1024 / 1e6;
    }
  }
  return sum;
}

/// Records the peak memory of this rank while the object lives.
class Peak : tessera::NoCopy {
 public:
  explicit Peak(std::vector<std::string> kinds = {"Pss:"}, std::chrono::milliseconds every = std::chrono::milliseconds(100))
      : watch_([this, kinds = std::move(kinds), every] {
          while (!ends_) {
            most_ = std::max(most_.load(), own_megabytes(kinds));
            std::this_thread::sleep_for(every);
          }
        }) {}
  ~Peak() {
    ends_ = true;
    watch_.join();
  }
  double megabytes() const { return most_; }

 private:
  std::atomic<bool> ends_ = false;
  std::atomic<double> most_ = 0;
  std::thread watch_;
};

/// The flags of a benchmark that trains. A size of 0 means the model's default.
struct TrainingFlags {
  std::string model = "mlp", dtype = "fp32";
  int steps = 12, warmup = 4;
  int64_t batch = 0, width = 0, layers = 0;

  void add_to(CLI::App& app, const std::vector<std::string>& models) {
    app.add_option("--model", model)->check(CLI::IsMember(models))->capture_default_str();
    app.add_option("--dtype", dtype)->check(CLI::IsMember({"fp32", "bf16"}))->capture_default_str();
    app.add_option("--steps", steps)->check(CLI::Range(1, 100'000))->capture_default_str();
    app.add_option("--warmup", warmup)->check(CLI::Range(0, 100'000))->capture_default_str();
    app.add_option("--batch", batch, "Samples per rank and step; by default the model's own number")->check(CLI::Range(1, 1'000'000));
    app.add_option("--width", width, "Of mlp, gpt, llama and vit")->check(CLI::Range(1, 1'000'000));
    app.add_option("--layers", layers, "Of mlp, gpt, llama and vit")->check(CLI::Range(1, 10'000));
  }
};

/// Returns `given` unless it is 0, the default of a flag.
inline int64_t or_else(int64_t given, int64_t otherwise) {
  return given > 0 ? given : otherwise;
}

struct Batch {
  at::Tensor inputs, targets;
};

/// A model of a benchmark: the modules that become units, the number of samples per rank, and functions for batches and their loss.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  std::vector<std::shared_ptr<torch::nn::Module>> units = {};
  int64_t batch = 0;
  std::function<Batch(int64_t batch)> draw;
  std::function<at::Tensor(const Batch&)> loss;
  std::function<void(const tessera::ShardOptions&)> shard_first = {};  // makes units inside of `units`
};

inline std::vector<std::shared_ptr<torch::nn::Module>> members(const torch::nn::ModuleList& list) {
  return {list->begin(), list->end()};
}

template <class Model, class Inputs>
Subject classifier(Model model, std::vector<std::shared_ptr<torch::nn::Module>> units, int64_t batch, int64_t classes, Inputs inputs) {
  return {
      .module = model.ptr(),
      .units = std::move(units),
      .batch = batch,
      .draw =
          [=](int64_t count) {
            return Batch{inputs(count), torch::randint(classes, {count}, torch::kLong)};
          },
      .loss = [=](const Batch& drawn) mutable { return torch::cross_entropy_loss(model(drawn.inputs).to(torch::kFloat), drawn.targets); }};
}

/// Random tokens, with the next token of each as its target.
inline Batch draw_tokens(int64_t vocabulary, int64_t count, int64_t length) {
  const auto tokens = torch::randint(vocabulary, {count, length + 1}, torch::kLong);
  return {tokens.narrow(1, 0, length).contiguous(), tokens.narrow(1, 1, length).contiguous()};
}

inline Subject gpt(tessera::models::Gpt model, const tessera::models::GptOptions& options, int64_t batch) {
  return {.module = model.ptr(),
          .units = members(model->blocks),
          .batch = batch,
          .draw =
              [=](int64_t count) {
                auto drawn = draw_tokens(options.vocabulary, count, options.longest);
                drawn.targets = drawn.targets.flatten();
                return drawn;
              },
          .loss =
              [=](const Batch& drawn) mutable {
                return torch::cross_entropy_loss(model(drawn.inputs).to(torch::kFloat).view({-1, options.vocabulary}), drawn.targets);
              }};
}

/// Reads the command line and runs the benchmark. Returns the exit status.
inline int run(CLI::App& app, int argc, char** argv, const auto& body) try {
  app.parse(argc, argv);
  body();
  return 0;
} catch (const CLI::ParseError& error) {
  return app.exit(error);
} catch (const std::exception& error) {
  fmt::print(stderr, "{}: {}\n", app.get_name(), error.what());
  return 1;
}

}  // namespace bench
