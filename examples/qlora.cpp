// Trains adapters on top of frozen weights in 4 bits: tessera launch -n 2 qlora WEIGHTS ADAPTER
// WEIGHTS is a file or folder of any format, ADAPTER a new folder that Python's peft reads.
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  if (argc != 3) throw UsageError("usage: qlora WEIGHTS ADAPTER");

  torch::manual_seed(1);  // the same adapters on every rank
  const models::MlpOptions shape{.width = 32, .layers = 2, .classes = 4};
  auto model = deferred_init([&] { return models::Mlp(shape); });
  nn::quantize(model, {.quantization = nn::Quantization::Nf4});
  lora::apply(model, {.r = 4, .lora_alpha = 8});
  fully_shard(model, {.start = Start::Loaded});
  checkpoint::load_weights(model, argv[1], {.may_be_missing = {".*\\.lora_.*"}});
  optim::AdamW optimizer(parameters(model), {.lr = 1e-2});

  torch::manual_seed(2 + world.rank());  // different batches on every rank
  for (int step = 0; step < 20; step++) {
    const auto x = torch::randn({16, 32});
    const auto loss = torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1));
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    if (world.is_first() && step % 19 == 0) std::printf("step %d loss %.2f\n", step, loss.item().toDouble());
  }
  checkpoint::save_adapter(model, argv[2], world, {.base = argv[1]});
}
