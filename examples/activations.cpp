// Trains with activations kept, computed again in backward, partly kept, and on disk: four times the same losses.
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <optional>

using namespace tessera;
using How = std::optional<activation::Options>;

/// What models::Gpt computes, with each block as a segment.
torch::Tensor scores_of(models::Gpt& model, const torch::Tensor& ids, const How& how) {
  auto x = model->tokens(ids) + model->positions(torch::arange(ids.size(1)));
  for (const auto& each : *model->blocks) {
    const auto block = std::static_pointer_cast<models::GptBlockImpl>(each);
    x = how ? activation::checkpoint(*how, block, x) : block->forward(x);
  }
  return model->head(model->norm(x));
}

double loss_after_training(const Communicator& world, const How& how) {
  torch::manual_seed(1);
  models::Gpt model(models::GptOptions{.vocabulary = 32, .width = 64, .layers = 4, .heads = 4, .longest = 64});
  fully_shard(model, {.mesh = world}, wrap_classes({"GptBlock"}));
  optim::AdamW optimizer(model->parameters(), {.lr = 3e-3});
  double last = 0;
  for (int step = 0; step < 10; step++) {
    const auto ids = (torch::arange(65).mul(step + world.rank() + 1) % 32).expand({8, 65});
    const auto loss = torch::cross_entropy_loss(scores_of(model, ids.slice(1, 0, 64), how).flatten(0, 1), ids.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    last = loss.item<double>();
  }
  return last;
}

/// A model of one's own whose calls can be seen.
struct Stack : torch::nn::Module {
  torch::nn::ModuleList blocks = register_module("blocks", torch::nn::ModuleList());
  Called<torch::nn::Linear> head{nullptr};
  Stack() {
    for (int i = 0; i < 4; i++) blocks->push_back(torch::nn::Linear(64, 64));
    head = register_module("head", Called<torch::nn::Linear>(64, 4));
  }
  torch::Tensor forward(torch::Tensor x) {
    for (const auto& each : *blocks) x = call(each->as<torch::nn::Linear>(), x).relu();  // in place of each->forward(x)
    return head(x);                                                                     // the holder is a call by itself
  }
};

/// The short way, where the model calls its parts through tessera::call, or is called as a whole.
double loss_of_checkpointed_model(const Communicator& world) {
  torch::manual_seed(1);
  const auto model = std::make_shared<Stack>();
  fully_shard(model, {.mesh = world});
  activation::checkpoint_module(model);  // before or after fully_shard
  const auto loss = torch::cross_entropy_loss(call(model, torch::ones({2, 64})), torch::zeros({2}, torch::kLong));
  loss.backward();
  return loss.item<double>();
}

int main() {
  const auto world = init();
  const auto show = [&](const char* how, double loss) {
    if (world.rank() == 0) std::printf("%-22s loss %.3f\n", how, loss);
  };
  show("kept", loss_after_training(world, {}));
  show("computed again", loss_after_training(world, activation::Options{}));
  const auto products = activation::operators({"aten::addmm", "aten::mm"});
  show("all but products again", loss_after_training(world, activation::Options{.keep = products}));
  show("inputs on disk", loss_after_training(world, activation::Options{.offload = OffloadTo::Disk, .disk = {.folder = "."}}));
  show("another model", loss_of_checkpointed_model(world));
}
