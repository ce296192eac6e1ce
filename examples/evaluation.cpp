// The accuracy over the test samples of all ranks, each counted once: tessera launch -n 2 evaluation
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

double evaluate(models::Mlp& model, data::Loader& test, const Communicator& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  train::Mean accuracy;
  for (const auto& batch : test) {
    const auto own = batch.size() - batch.repeats;  // the rest only fills the last batch
    accuracy.add(train::accuracy(model(batch.inputs).narrow(0, 0, own), batch.targets.narrow(0, 0, own)), own);
  }
  model->train();
  return accuracy.value(world);  // the mean over the samples of all ranks
}

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 32, .layers = 3, .classes = 4});
  fully_shard(model);
  optim::AdamW optimizer(parameters(*model), {.lr = 1e-2});

  const auto inputs = torch::randn({500, 32});
  const data::Samples rows{.inputs = inputs, .targets = inputs.slice(1, 0, 4).argmax(1)};
  data::Loader test(data::Sampler({.size = rows.size(),
                                   .global_batch = 32 * world.size(),
                                   .local_ranks = world.local_ranks(),
                                   .ranks = world.size(),
                                   .order = data::Order::AsStored,
                                   .tail = data::Tail::Fill}),
                    [&](std::span<const int64_t> numbers) { return data::pick(rows, numbers); });

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  for (int step = 1; step <= 100; step++) {
    const auto x = torch::randn({32, 32});
    torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1)).backward();
    optimizer.step();
    optimizer.zero_grad();
    if (step % 50 == 0) {
      const auto right = evaluate(model, test, world);  // all ranks call it
      if (world.rank() == 0) std::printf("%.0f %% right after step %d\n", 100 * right, step);
    }
  }
}
