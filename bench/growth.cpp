// Measures how the cost of a rank grows: one rank's step of many small units with a growing number of simulated peers, and the time to make
// a growing number of units.
//   build/bin/bench_growth [steps|units]
#include <fmt/format.h>
#include <tessera/base/table.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <array>
#include <cstdlib>
#include <string>
#include <vector>

#include "bench.h"

namespace {

struct ModelImpl : torch::nn::Module {
  explicit ModelImpl(int units) {
    for (int i = 0; i < units; i++) layers.push_back(register_module("l" + std::to_string(i), torch::nn::Linear(8, 8)));
  }
  at::Tensor forward(at::Tensor x) {
    for (auto& layer : layers) x = layer(x);
    return x;
  }
  std::vector<torch::nn::Linear> layers;
};
TORCH_MODULE(Model);

void shard(const Model& model, const tessera::Communicator& world) {
  for (const auto& layer : model->layers) tessera::fully_shard(layer, {.mesh = world});
  tessera::fully_shard(model, {.mesh = world});
}

/// Returns the milliseconds of the fastest of several steps.
double step_time(int ranks, int units) {
  Model model(units);
  shard(model, tessera::fake_world(0, ranks));
  tessera::optim::SGD optimizer(model->parameters(), {.lr = 1e-3});
  const auto x = torch::ones({2, 8});
  return 1e3 * bench::best_of(9, [&] {
           model->forward(x).sum().backward();
           optimizer.step();
           optimizer.zero_grad();
         });
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  if (part != "units") {
    constexpr int kUnits = 64;
    std::vector<std::array<std::string, 2>> rows = {{"ranks", "ms"}};
    for (const int ranks : {2, 8, 64, 512, 4096}) rows.push_back({std::to_string(ranks), fmt::format("{:.1f}", step_time(ranks, kUnits))});
    fmt::print("a step of {} small units\n{}", kUnits, tessera::table_of(rows, ">>"));
  }
  if (part != "steps") {
    step_time(2, 8);  // keeps the cost of the library's first use out of the table
    std::vector<std::array<std::string, 3>> rows = {{"units", "ms", "us a unit"}};
    for (const int units : {8, 64, 512, 4096}) {
      Model model(units);
      const auto took = 1e3 * bench::seconds_of([&] { shard(model, tessera::fake_world(0, 2)); });
      rows.push_back({std::to_string(units), fmt::format("{:.1f}", took), fmt::format("{:.1f}", 1e3 * took / units)});
    }
    fmt::print("making units for 2 ranks\n{}", tessera::table_of(rows, ">>>"));
  }
  return EXIT_SUCCESS;
}
