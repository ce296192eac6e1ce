// Every rank gathers the parts of all ranks, while it does other work: tessera launch -n 2 all_gather
#include <ATen/ATen.h>
#include <tessera/tessera.h>

#include <array>
#include <cstdio>

int main() {
  const auto world = tessera::init();
  const int64_t n = 4, step = 0;
  const auto shard = at::full({n}, static_cast<float>(world.rank()));
  const tessera::Piece piece{.whole = at::empty({world.size() * n}), .own = shard};
  auto work = world.all_gather(std::array{piece}, {.unit = "layers.3", .version = step});
  // ... do other work meanwhile
  work.wait();
  if (world.rank() == 0) std::printf("the sum of all parts is %g\n", piece.whole.sum().item<double>());
}
