// A unit that the ranks gather while the batch is made: tessera launch -n 2 unshard
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 64, .layers = 4, .classes = 4});
  // Where the ranks of a host share one copy, there is nothing to gather.
  fully_shard(model, {.residence = Residence::Gathered}, wrap_classes({"Linear"}));
  optim::AdamW optimizer(parameters(*model), {.lr = 3e-3});

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  double last = 0;
  for (int step = 0; step < 20; step++) {
    const auto first = unshard(*model->blocks[0]);  // the ranks gather the unit while this rank makes its batch
    const auto x = torch::randn({16, 64});
    first.wait();  // may be left out: the first operator that needs the unit waits as well
    const auto loss = torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  if (world.rank() == 0) std::printf("loss %.3f\n", last);
}
