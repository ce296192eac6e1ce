// Mirrors images at random, alike on any number of ranks: tessera launch -n 2 augment
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <random>

using namespace tessera;

int main() {
  const auto world = init();
  const auto images = data::fake_images({.count = 960});
  data::Loader loader(
      data::Sampler({.size = images.size(), .global_batch = 96, .local_ranks = world.local_ranks(), .ranks = world.size(), .seed = 1}),
      [&](std::span<const int64_t> numbers, std::span<const uint64_t> seeds) {
        auto batch = data::pick(images, numbers);
        for (int64_t i = 0; i < batch.size(); i++) {  // whether an image is mirrored is drawn anew in every epoch
          std::mt19937_64 random(seeds[static_cast<size_t>(i)]);
          if (random() % 2 == 0) batch.inputs[i] = batch.inputs[i].flip(1);
        }
        return batch;
      });

  for (int epoch = 0; epoch < 2; epoch++) {
    auto left = torch::zeros({1}, torch::kLong);
    for (const auto& batch : loader) left += batch.inputs.narrow(2, 0, 14).sum();
    world.all_reduce(left).wait();
    if (world.rank() == 0) std::printf("epoch %d: the left halves add up to %lld\n", epoch, static_cast<long long>(left.item<int64_t>()));
  }
}
