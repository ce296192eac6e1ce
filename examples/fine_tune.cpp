// Loads a file, trains the head of the model, writes a file: tessera launch -n 2 fine_tune WEIGHTS.safetensors RESULT.safetensors
// The optimizer is one of torch's own.
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <filesystem>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  if (argc != 3) throw UsageError("usage: fine_tune WEIGHTS.safetensors RESULT.safetensors");

  models::Mlp model(models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
  fully_shard(model);
  checkpoint::load_weights(*model, argv[1]);  // as consolidate() or Python writes it

  set_requires_grad(*model->blocks, Training::Frozen);
  torch::optim::Adam optimizer(model->head->parameters(), 1e-2);
  for (int step = 0; step < 20; step++) {
    const auto x = torch::randn({16, 32});
    torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1)).backward();
    clip_grad_norm(model->head->parameters(), 1.0);
    optimizer.step();
    optimizer.zero_grad();
  }

  const std::filesystem::path result = argv[2], parts = result.string() + ".parts";
  checkpoint::save(parts, {.model = model.get()}, world);
  const auto written = checkpoint::consolidate(parts, result, world);
  if (world.rank() != 0) return 0;
  std::filesystem::remove_all(parts);
  std::printf("%s: %lld parameters\n", result.c_str(), static_cast<long long>(written.parameters));
}
