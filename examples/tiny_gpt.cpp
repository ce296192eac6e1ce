// A language model of characters that continues a text, in bfloat16: tessera launch -n 2 tiny_gpt [TEXT]
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  constexpr int64_t kLength = 64;
  std::ifstream file(argc > 1 ? argv[1] : __FILE__);
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (static_cast<int64_t>(text.size()) <= kLength) throw UsageError("give a text file of more than 64 characters");
  const auto characters = torch::from_blob(text.data(), {static_cast<int64_t>(text.size())}, torch::kUInt8).to(torch::kLong);

  torch::manual_seed(1);
  models::Gpt model(models::GptOptions{.vocabulary = 256, .width = 64, .layers = 2, .heads = 4, .longest = kLength});
  const ShardOptions options{.mixed_precision = {.param_dtype = torch::kBFloat16}};
  fully_shard(model, options, wrap_classes({"GptBlock"}));  // each block is a unit, and the rest is one
  optim::AdamW optimizer(model->parameters(), {.lr = 3e-3});

  torch::manual_seed(2 + static_cast<uint64_t>(world.rank()));
  train::Progress progress({.title = "tiny gpt", .steps = 60, .line_every = 30, .rank = world.rank()});
  for (int64_t step = 1; step <= 60; step++) {
    const auto starts = torch::randint(characters.size(0) - kLength, {8, 1});
    const auto batch = characters.index({starts + torch::arange(kLength + 1)});
    const auto scores = model(batch.slice(1, 0, kLength)).to(torch::kFloat);
    const auto loss = torch::cross_entropy_loss(scores.flatten(0, 1), batch.slice(1, 1).flatten());
    loss.backward();
    optimizer.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
    if (step % 10 == 0) progress.update(step, {{"loss", loss.item<double>()}});
  }
  progress.finish();

  // All ranks take part in each forward pass; they draw the same characters, because they see the same scores.
  const torch::NoGradGuard no_grad;
  auto said = characters.slice(0, 0, 16).unsqueeze(0);
  for (int i = 0; i < 40; i++) {
    const auto scores = model(said.slice(1, std::max<int64_t>(0, said.size(1) - kLength)));
    said = torch::cat({said, scores.select(1, -1).argmax(1, true)}, 1);
  }
  if (world.rank() != 0) return 0;
  for (int64_t i = 0; i < said.size(1); i++) std::printf("%c", static_cast<char>(said[0][i].item<int64_t>()));
  std::printf("\n");
}
