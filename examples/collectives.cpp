// The mean of a number over all ranks: tessera launch -n 2 collectives
#include <ATen/ATen.h>
#include <tessera/tessera.h>

#include <cstdio>

int main() {
  auto world = tessera::init();  // torchrun, mpirun, or alone: then a world of one
  auto loss = at::full({1}, 0.5 + world.rank());
  auto work = world.all_reduce(loss, {.op = tessera::Reduce::Mean}, {.unit = "loss"});
  // ... other work meanwhile
  work.wait();
  const auto mean = loss.item<float>();
  if (world.rank() == 0) std::printf("mean over %d ranks: %g\n", world.size(), mean);
}
