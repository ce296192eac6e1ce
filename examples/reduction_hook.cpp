// Gradients that travel in bfloat16, and sums in place of means: tessera launch -n 2 reduction_hook
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <span>

using namespace tessera;

/// Runs in place of the reduction: sends gradients in bfloat16, and adds them up in float32.
void compress(const PackedGradient& gradient) {
  const auto narrow = gradient.whole.to(torch::kBFloat16);
  const Piece piece{.whole = narrow, .own = gradient.shard};
  gradient.mesh.shard().reduce_scatter(std::span(&piece, 1), {.op = Reduce::Mean}, {.unit = gradient.unit}).wait();
  // Without replicas, replicate() is a group of one rank.
  gradient.mesh.replicate().all_reduce(gradient.shard, {.op = Reduce::Mean}, {.unit = gradient.unit}).wait();
}

/// Returns the last loss of this rank.
double loss_after_training(models::Mlp& model) {
  optim::AdamW optimizer(parameters(*model), {.lr = 3e-3});
  double last = 0;
  for (int step = 0; step < 20; step++) {
    const auto x = torch::randn({16, 64});
    const auto loss = torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  return last;
}

int main() {
  const auto world = init();
  torch::manual_seed(1);
  models::Mlp model(models::MlpOptions{.width = 64, .layers = 4, .classes = 4});
  fully_shard(model, {}, wrap_classes({"Linear"}));
  torch::manual_seed(2 + world.rank());  // different batches on every rank

  set_reduction_hook(*model, compress);
  auto loss = loss_after_training(model);
  if (world.rank() == 0) std::printf("with gradients in bfloat16: loss %.3f\n", loss);

  set_reduction_hook(*model, {});  // the usual reduction again, but of the sum over all ranks
  set_gradient_divide_factors(*model, {.pre = 1, .post = 1});
  loss = loss_after_training(model);
  if (world.rank() == 0) std::printf("with sums of gradients: loss %.3f\n", loss);
}
