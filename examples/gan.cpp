// Two models that train in turn, in one checkpoint: tessera launch -n 2 gan
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;

struct GanImpl : torch::nn::Module {
  torch::nn::Sequential generator{torch::nn::Linear(8, 64), torch::nn::ReLU(), torch::nn::Linear(64, 2)};
  torch::nn::Sequential discriminator{torch::nn::Linear(2, 64), torch::nn::ReLU(), torch::nn::Linear(64, 1)};
  GanImpl() {
    register_module("generator", generator);
    register_module("discriminator", discriminator);
  }
};
TORCH_MODULE(Gan);

int main() {
  const auto world = init();
  torch::manual_seed(1);
  Gan gan;
  fully_shard(gan->generator);
  fully_shard(gan->discriminator);
  optim::Adam for_generator(parameters(*gan->generator), {}), for_discriminator(parameters(*gan->discriminator), {});

  torch::manual_seed(2 + world.rank());
  const auto loss_of = [&](const at::Tensor& x, double truth) {
    const auto scores = gan->discriminator->forward(x);
    return torch::binary_cross_entropy_with_logits(scores, torch::full_like(scores, truth));
  };
  for (int step = 0; step < 500; step++) {
    const auto real = torch::randn({32, 2}) + 3;
    const auto fake = gan->generator->forward(torch::randn({32, 8}));
    (loss_of(real, 1) + loss_of(fake.detach(), 0)).backward();
    for_discriminator.step();
    for_discriminator.zero_grad();
    loss_of(fake, 1).backward();
    for_generator.step();
    for_generator.zero_grad();
    for_discriminator.zero_grad();  // because the generator's backward pass has given the discriminator gradients, too
  }
  const auto made = gan->generator->forward(torch::randn({256, 8})).mean().item<double>();
  if (world.rank() == 0) std::printf("the mean of what is made is %.1f, that of the data 3.0\n", made);

  checkpoint::Contents contents{.model = gan.get(), .optimizer = {&for_generator, &for_discriminator}};
  checkpoint::save("run/gan", contents, world);
}
