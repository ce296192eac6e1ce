// Activations that are kept, computed again, partly kept, or on disk, with the same losses: tessera launch -n 2 activations
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <optional>

using namespace tessera;
using How = std::optional<activation::Options>;

/// Computes the same as models::Gpt, with each block as a segment.
torch::Tensor scores_of(models::Gpt& model, const torch::Tensor& ids, const How& how) {
  auto x = model->tokens(ids) + model->positions(torch::arange(ids.size(1)));
  for (const auto& each : *model->blocks) {
    const auto block = std::static_pointer_cast<models::GptBlockImpl>(each);
    x = how ? activation::checkpoint(*how, block, x) : block->forward(x);
  }
  return model->head(model->norm(x));
}

/// Trains, and prints the last loss of rank 0.
void show_loss(const char* name, const How& how, const Communicator& world) {
  torch::manual_seed(1);
  models::Gpt model(models::GptOptions{.vocabulary = 32, .width = 64, .layers = 4, .heads = 4, .longest = 64});
  fully_shard(model, {}, wrap_classes({"GptBlock"}));
  optim::AdamW optimizer(model->parameters(), {.lr = 3e-3});
  double last = 0;
  for (int step = 0; step < 10; step++) {
    const auto ids = (torch::arange(65).mul(step + world.rank() + 1) % 32).expand({8, 65});
    const auto scores = scores_of(model, ids.slice(1, 0, 64), how);
    const auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), ids.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  if (world.rank() == 0) std::printf("%-22s loss %.3f\n", name, last);
}

int main() {
  const auto world = init();
  show_loss("kept", {}, world);
  show_loss("computed again", activation::Options{}, world);
  const auto products = activation::operators({"aten::addmm", "aten::mm"});
  show_loss("all but products again", activation::Options{.keep = products}, world);
  show_loss("inputs on disk", activation::Options{.offload = OffloadTo::Disk, .disk = {.folder = "."}}, world);
}
