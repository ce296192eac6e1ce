// Continues a run of PyTorch's FSDP or of Accelerate, and writes the result for Accelerate: tessera launch -n 2 from_python RUN RESULT
#include <tessera/models/mlp.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  if (argc != 3) throw UsageError("usage: from_python RUN RESULT");

  models::Mlp model(models::MlpOptions{.width = 32, .layers = 2, .classes = 4});
  fully_shard(model);
  optim::AdamW optimizer(parameters(*model), {.lr = 0.001});

  checkpoint::Contents run{.model = model.get(), .optimizer = &optimizer};
  checkpoint::load(argv[1], run, world);  // a folder of torch.distributed.checkpoint or of save_state, or a file of torch.save

  for (int step = 0; step < 20; step++) {
    const auto x = torch::randn({16, 32});
    torch::cross_entropy_loss(model(x), x.slice(1, 0, 4).argmax(1)).backward();
    optimizer.step();
    optimizer.zero_grad();
  }

  const std::filesystem::path result = argv[2], parts = result.string() + ".parts";
  checkpoint::save(parts, run, world);
  if (world.rank() != 0) return 0;
  const auto done = checkpoint::convert(parts, result, {.to = checkpoint::Format::Accelerate, .world = 2, .settings = {{"lr", 0.001}}});
  std::filesystem::remove_all(parts);
  std::printf("%s: %lld tensors\n", result.c_str(), static_cast<long long>(done.tensors));
}
