#include "tessera/cli/ranks_here.h"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
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

std::string random_secret() {
  std::random_device source;
  return fmt::format("{:08x}{:08x}{:08x}{:08x}", source(), source(), source(), source());
}

}  // namespace tessera::cli
