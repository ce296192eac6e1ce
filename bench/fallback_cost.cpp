// Measures the extra cost of an operator with an unsharded parameter among its operands, and the cost of a step of torch's AdamW on a unit
// of many small parameters.
//   build/bin/bench_fallback_cost
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <vector>

#include "bench.h"

namespace {

/// Nanoseconds of one call: the median of several rounds.
template <class Call>
double nanoseconds(const Call& call) {
  constexpr int kCalls = 20'000;
  std::vector<double> rounds;
  for (int round = 0; round < 9; round++) {
    rounds.push_back(1e9 / kCalls * bench::seconds_of([&] {
                       for (int i = 0; i < kCalls; i++) call();
                     }));
  }
  return bench::median(rounds);
}

struct Many : torch::nn::Module {
  std::vector<at::Tensor> scales;
  explicit Many(int count) {
    for (int i = 0; i < count; i++) scales.push_back(register_parameter("p" + std::to_string(i), torch::full({4}, 0.5F)));
  }
  at::Tensor forward(at::Tensor x) {
    for (const auto& scale : scales) x = x * scale;
    return x;
  }
};

/// Seconds of a forward and backward pass and a step: the fastest of several.
double step_of(Many& model) {
  torch::optim::AdamW optimizer(model.parameters(), torch::optim::AdamWOptions(1e-3));
  return bench::best_of(5, [&] {
    model.forward(torch::ones({4})).sum().backward();
    optimizer.step();
    optimizer.zero_grad();
  });
}

void compare_units() {
  std::printf("\n%-34s %11s %11s\n", "a step with torch's AdamW", "plain", "two ranks");
  for (const int count : {500, 5000}) {
    Many whole(count);
    const double plain = step_of(whole);
    double sharded = 0;
    tessera::run_ranks(2, [&](const tessera::Communicator& world) {
      Many part(count);
      tessera::fully_shard(part, {.mesh = world});
      const double own = step_of(part);
      if (world.rank() == 0) sharded = own;
    });
    std::printf("%-34s %8.0f ms %8.0f ms\n", (std::to_string(count) + " parameters in one unit").c_str(), plain * 1e3, sharded * 1e3);
  }
}

}  // namespace

int main() {
  at::set_num_threads(1);
  compare_units();
  const torch::NoGradGuard no_grad;
  torch::nn::Linear plain(8, 8), paged(8, 8);
  tessera::fully_shard(paged, {.mesh = tessera::self_world()});
  const auto x = torch::randn({2, 8}), y = torch::randn({8});
  const auto row = [&](const char* name, const auto& call) {
    const double without = nanoseconds([&] { call(plain); }), with = nanoseconds([&] { call(paged); });
    std::printf("%-34s %8.0f ns %8.0f ns %+8.0f ns\n", name, without, with, with - without);
  };
  std::printf("%-34s %11s %11s %11s\n", "operator", "plain", "sharded", "difference");
  row("add(x, bias): one operand", [&](auto& m) { return at::add(y, m->bias); });
  row("linear(x, weight, bias): two", [&](auto& m) { return at::linear(x, m->weight, m->bias); });
  row("Linear::forward: addmm and a view", [&](auto& m) { return m->forward(x); });
}
