// The same losses on any number of ranks, and in plain libtorch: tessera launch -n 3 same_losses TEXT; same_losses TEXT plain
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <vector>

using namespace tessera;

constexpr int64_t kLength = 64, kBatch = 12, kSteps = 100;

at::Tensor characters_of(const char* path) {
  std::ifstream file(path);
  const std::vector<uint8_t> text{std::istreambuf_iterator<char>(file), {}};
  if (text.size() <= kLength) throw UsageError("usage: same_losses [TEXT [plain]], where TEXT is a file of some length");
  return torch::tensor(text).to(torch::kLong);
}

/// Draws the same batches on all ranks, and trains on this rank's part of each.
template <class Optimizer>
void train_model(models::Gpt& model, Optimizer& optimizer, const Communicator& world, const at::Tensor& characters) {
  for (int64_t step = 0; step < kSteps; step++) {
    const auto starts = torch::randint(characters.size(0) - kLength, {kBatch, 1});
    const auto batch = characters.index({starts + torch::arange(kLength + 1)}).chunk(world.size())[world.rank()];
    auto loss = torch::cross_entropy_loss(model(batch.slice(1, 0, kLength)).flatten(0, 1), batch.slice(1, 1).flatten());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    loss = loss.detach();
    world.all_reduce(loss, {.op = Reduce::Mean}).wait();
    if (world.rank() == 0) std::printf("%lld %.8f\n", static_cast<long long>(step), loss.item<double>());
  }
}

int main(int argc, char** argv) {
  const auto world = init();
  const auto characters = characters_of(argc > 1 ? argv[1] : __FILE__);
  torch::manual_seed(1);
  models::Gpt model(models::GptOptions{.vocabulary = 256, .width = 64, .layers = 2, .heads = 4, .longest = kLength});
  if (argc > 2) {
    torch::optim::AdamW optimizer(model->parameters(), torch::optim::AdamWOptions(3e-3).weight_decay(0.01));
    train_model(model, optimizer, world, characters);
  } else {
    fully_shard(model, {}, wrap_classes({"GptBlock"}));
    optim::AdamW optimizer(model->parameters(), {.lr = 3e-3, .weight_decay = 0.01});
    train_model(model, optimizer, world, characters);
  }
}
