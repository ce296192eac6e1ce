// Shards over the ranks of a row and replicates over the rows (HSDP), with threads as ranks: hybrid
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main() {
  run_ranks(4, [](const Communicator& world) {
    const Mesh mesh(world, {.replicate = 2, .shard = 2});
    models::Mlp model(models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
    fully_shard(model, {.mesh = mesh, .start = Start::FromRank0});  // threads share one random generator
    optim::SGD optimizer(model->parameters(), {.lr = 0.1});

    const auto x = torch::full({4, 32}, 0.1 * (1 + world.rank()));
    model(x).pow(2).mean().backward();
    optimizer.step();

    int own = 0, all = 0;
    for (const auto& parameter : parameters(*model)) {
      own += static_cast<int>(shard_info(parameter)->numel);
      all += static_cast<int>(full_parameter(parameter).numel());  // full_parameter() returns the whole parameter on every rank
    }
    if (world.rank() == 0) {
      std::printf("rank 0 of %d is in a row of %d and holds %d of %d values\n", world.size(), mesh.shard().size(), own, all);
    }
  });
}
