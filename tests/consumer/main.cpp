// Three ranks as threads add up their numbers.
#include <ATen/ATen.h>
#include <tessera/tessera.h>

#include <iostream>

int main() {
  tessera::run_ranks(3, [](const tessera::Communicator& world) {
    const auto tensor = at::full({2}, static_cast<float>(world.rank() + 1));
    world.all_reduce(tensor, {.op = tessera::Reduce::Sum}, {.unit = "numbers"}).wait();
    if (world.rank() == 0) std::cout << "sum over " << world.size() << " ranks: " << tensor[0].item<float>() << '\n';
  });
}
