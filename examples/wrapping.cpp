// The cost of one training step for four ways to divide a transformer into units: wrapping
#include <tessera/models/gpt.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <memory>
#include <vector>

using namespace tessera;
using Modules = std::vector<std::shared_ptr<torch::nn::Module>>;

void blocks_and_the_rest(models::Gpt& model, const ShardOptions& options) {
  for (auto& block : *model->blocks) fully_shard(block, options);
  fully_shard(model, options);  // makes one unit of what is left: embeddings, norm and head
}

void each_apart(models::Gpt& model, const ShardOptions& options) {
  for (const auto& module : Modules{model->tokens.ptr(), model->positions.ptr(), model->norm.ptr(), model->head.ptr()}) {
    fully_shard(module, options);
  }
  blocks_and_the_rest(model, options);  // nothing is left, so this call makes no unit, but joins the units to one model
}

void lists(models::Gpt& model, const ShardOptions& options) {
  fully_shard(Modules{model->tokens.ptr(), model->positions.ptr()}, options);
  fully_shard(Modules{model->norm.ptr(), model->head.ptr()}, options);
  blocks_and_the_rest(model, options);
}

/// Trains, and prints the cost of the last step on rank 0.
void measure(const char* name, void (*divide)(models::Gpt&, const ShardOptions&), const ShardOptions& options, int rank) {
  models::Gpt model(models::GptOptions{.vocabulary = 2000, .width = 64, .layers = 4, .heads = 4, .longest = 32});
  divide(model, options);
  optim::SGD optimizer(parameters(*model), {.lr = 0.1});
  const auto tokens = torch::arange(64).view({2, 32}) + 100 * rank;
  for (int step = 0; step < 4; step++) {
    if (step == 3) reset_counters(*model);  // the order of uses is known by now
    model(tokens).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (rank != 0) return;
  const auto cost = counters(*model);
  std::printf("%-24s %2d all-gathers  %2d reductions  %5.2f MB received  %5.2f MB unsharded at most\n", name,
              static_cast<int>(cost.gathers), static_cast<int>(cost.reductions), static_cast<double>(cost.gathered_bytes) / 1e6,
              static_cast<double>(cost.peak_unsharded_bytes) / 1e6);
}

int main() {
  run_ranks(2, [](const Communicator& world) {
    ShardOptions options{.mesh = world, .start = Start::FromRank0, .residence = Residence::Gathered};
    measure("blocks, and the rest", blocks_and_the_rest, options, world.rank());
    measure("each apart", each_apart, options, world.rank());
    measure("lists", lists, options, world.rank());
    options.reshard_after_forward = false;
    measure("lists that stay", lists, options, world.rank());
  });
}
