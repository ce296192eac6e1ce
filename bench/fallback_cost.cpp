// What an operator costs more because one of its operands is a sharded parameter that is whole already.
//   build/bin/fallback_cost
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <vector>

namespace {

/// Nanoseconds of one call, the median of several rounds.
template <class Call>
double nanoseconds(const Call& call) {
  constexpr int kCalls = 20'000;
  std::vector<double> rounds;
  for (int round = 0; round < 9; round++) {
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < kCalls; i++) call();
    rounds.push_back(std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start).count() / kCalls);
  }
  std::ranges::sort(rounds);
  return rounds[rounds.size() / 2];
}

}  // namespace

int main() {
  at::set_num_threads(1);
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
