// Batch norm and a loss over the batches of all ranks: tessera launch -n 2 exchange
// Also changes whole gradients between backward and the step.
#include <tessera/nn/collectives.h>
#include <tessera/nn/sync_batch_norm.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

struct Encoder : torch::nn::Module {
  torch::nn::Linear body = register_module("body", torch::nn::Linear(8, 16));
  torch::nn::BatchNorm1d norm = register_module("norm", torch::nn::BatchNorm1d(16));
  torch::nn::Linear head = register_module("head", torch::nn::Linear(16, 4));
  at::Tensor forward(const at::Tensor& x) { return torch::nn::functional::normalize(head(torch::relu(norm(body(x))))); }
};

/// A loss that makes rows 2i and 2i + 1, which form a pair, similar to each other and different from all other rows.
at::Tensor pair_loss(const at::Tensor& features) {
  const auto scores = features.mm(features.t()).fill_diagonal_(-1e9) * 5;
  return torch::cross_entropy_loss(scores, torch::arange(features.size(0)).bitwise_xor(1));
}

int main() {
  const auto world = init();
  torch::manual_seed(1);
  const auto model = std::make_shared<Encoder>();
  fully_shard(*model);
  nn::convert_sync_batchnorm(*model, world);  // every BatchNorm1d to 3d of the model
  optim::AdamW optimizer(parameters(*model), {.lr = 1e-2});
  torch::manual_seed(2 + world.rank());
  double last = 0;
  for (int step = 0; step < 40; step++) {
    const auto x = torch::randn({8, 8}).repeat_interleave(2, 0) + 0.1 * torch::randn({16, 8});
    const auto features = nn::all_gather(model->forward(x), world);  // the features of the batches of all ranks
    const auto loss = pair_loss(features);                           // the same on every rank
    loss.backward();
    {
      const torch::NoGradGuard no_grad;
      const auto whole = full_params(*model, Access::Write, WithGradients::Yes);  // all ranks must make the same change
      auto gradient = model->head->weight.grad();
      gradient.sub_(gradient.mean());
      model->body->bias.mutable_grad() = at::Tensor();  // removes the gradient
    }
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  if (world.rank() == 0) std::printf("loss over the pairs of all ranks: %.3f\n", last);
}
