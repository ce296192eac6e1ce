#include "tessera/cli/launch/ranks_here.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <ctime>
#include <random>

#include "tessera/base/env.h"

namespace tessera::cli {

int cores() {
  cpu_set_t set;
  return ::sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

std::string threads_of_a_rank(int ranks) {
  return env("OMP_NUM_THREADS").value_or(std::to_string(std::max(1, cores() / ranks)));
}

std::optional<std::string> turns_of_a_wait(int ranks, const std::string& threads) {
  constexpr auto kTurns = "2000";
  const auto each = std::strtol(threads.c_str(), nullptr, 10);
  const bool is_said = env("OMP_WAIT_POLICY") || env("GOMP_SPINCOUNT");
  return is_said || each < 2 || each * ranks < cores() ? std::nullopt : std::optional<std::string>(kTurns);
}

std::string run_name() {
  const auto now = std::time(nullptr);
  std::tm local{};
  ::localtime_r(&now, &local);
  std::array<char, 32> text{};
  std::strftime(text.data(), text.size(), "%Y%m%d-%H%M%S", &local);
  return fmt::format("{}-{:04x}", text.data(), std::random_device()() & 0xffffU);
}

}  // namespace tessera::cli
