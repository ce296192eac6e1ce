// Trains on samples that each rank simulates by itself, as long as any rank has samples: tessera launch -n 2 join
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <optional>
#include <string>

using namespace tessera;

/// A swing that loses its energy, sooner on some ranks than on others. Returns its angle, and the sine of the angle as target.
struct Swing {
  float angle, decay, amplitude = 1;
  std::optional<data::Samples> operator()() {
    if (amplitude < 0.1F) return std::nullopt;
    amplitude *= decay;
    angle = std::fmod(angle + amplitude, 3.0F);
    return data::Samples{.inputs = torch::tensor({{angle}}), .targets = torch::tensor({{std::sin(angle)}})};
  }
};

int main() {
  Trainer trainer;
  trainer.set_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  trainer.prepare(model);
  optim::Adam optimizer(parameters(*model), {.lr = 0.01});
  trainer.prepare(optimizer);

  const auto rank = static_cast<float>(trainer.world().rank());
  const auto open = [rank](int64_t epoch) { return Swing{.angle = rank + static_cast<float>(epoch), .decay = 0.95F + 0.01F * rank}; };
  data::Loader loader(data::Stream({.open = open, .global_batch = 8, .tail = data::Tail::Keep}), {.join = trainer.world()});
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
