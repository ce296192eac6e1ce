// The cost of one training step for four ways to divide a Llama into units: llama_units
#include <tessera/llm/units.h>
#include <tessera/models/llama.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>

using namespace tessera;
using Model = models::LlamaForCausalLM;

const models::LlamaConfig kConfig = {.vocab_size = 2000,
                                     .hidden_size = 64,
                                     .intermediate_size = 176,
                                     .num_hidden_layers = 4,
                                     .num_attention_heads = 4,
                                     .num_key_value_heads = 2};

/// Trains, and prints the cost of the last step on rank 0.
void measure(const char* name, llm::Units units, bool last_stays, const Communicator& world) {
  Model model(kConfig);
  const ShardOptions options{.mesh = world, .start = Start::FromRank0, .residence = Residence::Gathered};
  auto of_ends = options;
  if (last_stays) of_ends.reshard_after_forward = false;  // backward begins with this unit
  llm::shard_ends(model, of_ends, units);
  fully_shard(model, options, wrap_classes({"LlamaDecoderLayer"}));
  optim::SGD optimizer(parameters(*model), {.lr = 0.1});
  const auto tokens = torch::arange(64).view({2, 32}) + 100 * world.rank();
  for (int step = 0; step < 4; step++) {
    if (step == 3) reset_counters(*model);  // the order of uses is known by now
    model->loss(tokens, tokens + 1).backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  if (world.rank() != 0) return;
  const auto cost = counters(*model);
  std::printf("%-26s %2d all-gathers  %2d reductions  %5.2f MB received  %5.2f MB unsharded at most\n", name,
              static_cast<int>(cost.gathers), static_cast<int>(cost.reductions), static_cast<double>(cost.gathered_bytes) / 1e6,
              static_cast<double>(cost.peak_unsharded_bytes) / 1e6);
}

int main() {
  run_ranks(2, [](const Communicator& world) {
    measure("layers, and the rest", llm::Units::Root, false, world);
    measure("each apart", llm::Units::Apart, false, world);
    measure("norm and head together", llm::Units::HeadWithNorm, false, world);
    measure("and they stay for backward", llm::Units::HeadWithNorm, true, world);
  });
}
