// Other ways in which parameters get their first values: tessera launch -n 2 starts
// Only rank 0 has the values, or a function fills one parameter after the other.
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

torch::nn::Sequential make() {
  return torch::nn::Sequential(torch::nn::Linear(64, 32), torch::nn::BatchNorm1d(32), torch::nn::Linear(32, 8));
}

struct Table : torch::nn::Module {  // the parameter is on the meta device, without values
  at::Tensor rows = register_parameter("rows", torch::empty({64, 32}, torch::kMeta));
};

int main() {
  const auto world = init();
  torch::manual_seed(1 + world.rank());  // ranks would draw different values

  auto model = world.rank() == 0 ? make() : deferred_init(make);
  fully_shard(model, {.start = Start::FromRank0});
  sync_buffers(*model, world);
  const auto first = full_tensor(*model, "0.weight");
  if (world.rank() == 0) std::printf("from rank 0: a deviation of %.3f\n", first.std().item<double>());

  torch::manual_seed(7);  // from here on, all ranks draw the same
  auto table = std::make_shared<Table>();
  const auto fill = [](const std::string& /*name*/, at::Tensor& values) { torch::nn::init::normal_(values, 0, 0.02); };
  fully_shard(table, {.param_init_fn = fill});
  const auto second = full_tensor(*table, "rows");
  if (world.rank() == 0) std::printf("from a function: a deviation of %.3f\n", second.std().item<double>());
}
