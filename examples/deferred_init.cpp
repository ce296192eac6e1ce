// A model that no rank ever holds as a whole: tessera launch -n 2 deferred_init [WEIGHTS.safetensors]
// The model is made without memory. Then its values are drawn part by part, or loaded from a file.
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  const bool loads = argc > 1;

  const models::GptOptions options{.vocabulary = 1024, .width = 256, .layers = 4};
  auto model = deferred_init([&] { return models::Gpt(options); }, {.seed = 7});
  const auto start = loads ? Start::Loaded : Start::Equal;  // Loaded: nothing is drawn for what a file replaces
  for (const auto& block : *model->blocks) fully_shard(block, {.start = start});
  fully_shard(model, {.start = start});
  if (loads) checkpoint::load_weights(*model, argv[1]);  // every rank reads its own part

  optim::AdamW optimizer(model->parameters(), {.lr = 1e-3});
  for (int step = 0; step < 3; step++) {
    const auto words = torch::randint(options.vocabulary, {4, 33});
    const auto scores = model->forward(words.slice(1, 0, 32)).flatten(0, 1);
    const auto loss = torch::cross_entropy_loss(scores, words.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (world.rank() == 0) std::printf("step %d loss %.3f\n", step, loss.item<double>());
  }
}
