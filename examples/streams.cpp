// Trains on lines of a file that rank 0 alone reads: tessera launch -n 2 streams FILE
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <fstream>
#include <memory>
#include <optional>
#include <string>

using namespace tessera;

/// Reads lines with an angle and its sine.
data::Pull lines_of(const std::string& path) {
  const auto file = std::make_shared<std::ifstream>(path);
  return [file]() -> std::optional<data::Samples> {
    float angle, sine;
    if (!(*file >> angle >> sine)) return std::nullopt;
    const auto x = torch::tensor({{angle}}), y = torch::tensor({{sine}});
    return data::Samples{.inputs = x, .targets = y};
  };
}

int main(int argc, char** argv) {
  if (argc != 2) throw UsageError("usage: streams FILE");
  const std::string path = argv[1];
  Trainer trainer;
  trainer.set_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  trainer.prepare(model);
  optim::Adam optimizer(parameters(*model), {.lr = 0.01});
  trainer.prepare(optimizer);

  const auto open = [&](int64_t /*epoch*/) { return lines_of(path); };
  auto stream = trainer.make_stream({.open = open, .global_batch = 16, .tail = data::Tail::Keep});
  data::Loader loader(std::move(stream), {.dispatch = trainer.world()});
  trainer.prepare(loader);

  torch::Tensor loss;
  while (loader.position().epoch < 40) {
    for (const auto& batch : loader) {
      loss = torch::mse_loss(model->forward(batch.inputs), batch.targets);
      trainer.backward(loss);  // weights the loss by the number of samples that this rank has of the batch
      trainer.step();
    }
  }
  trainer.print(std::to_string(trainer.steps()) + " steps, loss " + std::to_string(loss.item<float>()));
}
