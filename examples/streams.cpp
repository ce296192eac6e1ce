// Trains on samples that come one after the other: lines of a file that rank 0 reads, or what each rank simulates by itself.
// streams [FILE]
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <fstream>
#include <string>

using namespace tessera;

/// Each line has an angle and its sine.
data::Pull lines_of(const std::string& path) {
  return [file = std::make_shared<std::ifstream>(path)]() -> std::optional<data::Samples> {
    float angle, sine;
    if (!(*file >> angle >> sine)) return std::nullopt;
    return data::Samples{.inputs = torch::tensor({{angle}}), .targets = torch::tensor({{sine}})};
  };
}

/// A swing that loses its energy, at its own time on each rank.
data::Pull swing_of(int rank, int64_t epoch) {
  return
      [amplitude = 1.0F, angle = static_cast<float>(rank + epoch), decay = 0.95F + 0.01F * rank]() mutable -> std::optional<data::Samples> {
        if (amplitude < 0.1F) return std::nullopt;
        amplitude *= decay;
        angle = std::fmod(angle + amplitude, 3.0F);
        return data::Samples{.inputs = torch::tensor({{angle}}), .targets = torch::tensor({{std::sin(angle)}})};
      };
}

int main(int argc, char** argv) {
  Trainer trainer;
  const auto world = trainer.world();
  torch::manual_seed(1);
  torch::nn::Sequential model(torch::nn::Linear(1, 32), torch::nn::Tanh(), torch::nn::Linear(32, 1));
  trainer.prepare(model);
  optim::Adam optimizer(parameters(*model), {.lr = 0.01});
  trainer.prepare(optimizer);

  const auto make_loader = [&] {
    if (argc > 1) {
      const std::string path = argv[1];
      auto stream =
          trainer.make_stream({.open = [=](int64_t /*epoch*/) { return lines_of(path); }, .global_batch = 16, .tail = data::Tail::Keep});
      return data::Loader(std::move(stream), {.dispatch = world});
    }
    const auto open = [rank = world.rank()](int64_t epoch) { return swing_of(rank, epoch); };
    return data::Loader(data::Stream({.open = open, .global_batch = 8, .tail = data::Tail::Keep}), {.join = world});
  };
  auto loader = make_loader();
  trainer.prepare(loader);

  at::Tensor loss;
  while (loader.position().epoch < 40) {
    for (const auto& batch : loader) {
      loss = torch::mse_loss(model->forward(batch.inputs), batch.targets);
      trainer.backward(loss);  // counts by the samples that this rank has of the batch
      trainer.step();
    }
  }
  trainer.print("steps " + std::to_string(trainer.steps()) + ", " + (loss.item<float>() < 0.02F ? "learned" : "not learned"));
}
