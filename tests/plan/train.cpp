// Trains a small model on random data, and reports the most memory and the time of a step, for the comparison with its dry run.
#include <fmt/format.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdlib>
#include <memory>
#include <optional>

#include "../../bench/bench.h"

namespace {

using namespace tessera;

struct Flags {
  std::string model = "gpt", residence = "gathered";
  int64_t width = 512, layers = 4, batch = 4, length = 128, lora = 0;
  bool in_backward = false, checkpointing = false, bf16 = false;
};

constexpr int64_t kVocabulary = 1024;  // few, because the peak in their loss is too short to be seen
// Without files, of which more and more pages are libraries that have been used. The peak is short, so it is looked for often.
const std::vector<std::string> kKinds = {"Pss_Anon:", "Pss_Shmem:"};
constexpr auto kEvery = std::chrono::milliseconds(4);

/// Takes steps of a model that `make` makes, whose modules of the classes `units` become units, and prints a row.
template <class Make, class Loss>
void train(const Flags& flags, const Communicator& world, const std::vector<std::string>& units, const Make& make, const Loss& loss_of,
           bool reports) {
  world.barrier();
  const auto before = bench::own_megabytes(kKinds);
  auto model = deferred_init(make, {.seed = 1});
  torch::manual_seed(1);
  if (flags.lora > 0) lora::apply(model, {.r = flags.lora});
  ShardOptions options{.mesh = world, .residence = flags.residence == "gathered" ? Residence::Gathered : Residence::NodeShared};
  if (flags.bf16) options.mixed_precision.param_dtype = torch::kBFloat16;
  if (flags.checkpointing) activation::checkpoint_modules(model, wrap_classes(units));
  fully_shard(model, options, wrap_classes(units));
  optim::AdamW optimizer(parameters(*model), {});
  if (flags.in_backward) optimizer.step_in_backward();
  const auto step = [&] {
    loss_of(model).backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  step();
  step();
  std::optional<bench::Peak> peak(std::in_place, kKinds, kEvery);
  step();  // a dry run ends here
  const auto most = peak->megabytes();
  peak.reset();
  const auto seconds = bench::seconds_of_slowest(world, step);
  if (reports && world.is_first()) fmt::print("{{\"peak_mb\": {}, \"step_s\": {}}}\n", most - before, seconds);
}

void train(const Flags& flags, const Communicator& world, bool reports) {
  const auto [width, layers, batch, length] = std::tuple(flags.width, flags.layers, flags.batch, flags.length);
  if (flags.model == "mlp") {
    const auto make = [=] {
      torch::nn::Sequential model;
      for (int64_t i = 0; i < layers; i++) {
        model->push_back(torch::nn::Linear(width, width));
        model->push_back(torch::nn::ReLU());
      }
      return model;
    };
    return train(flags, world, {"Linear"}, make, [=](auto& model) { return model->forward(torch::randn({batch * length, width})).square().mean(); },
                 reports);
  }
  const auto targets = torch::randint(kVocabulary, {batch, length}, torch::kLong).to(world.traits().device), tokens = targets.clone();
  if (flags.model == "gpt") {
    const models::GptOptions options{.vocabulary = kVocabulary, .width = width, .layers = layers, .heads = width / 64, .longest = length};
    const auto loss_of = [=](models::Gpt& model) {
      return torch::cross_entropy_loss(model->forward(tokens).to(torch::kFloat).flatten(0, 1), targets.flatten());
    };
    return train(flags, world, {"GptBlock", "Embedding"}, [=] { return models::Gpt(options); }, loss_of, reports);
  }
  models::LlamaConfig config{.vocab_size = kVocabulary,
                             .hidden_size = width,
                             .intermediate_size = 3 * width,
                             .num_hidden_layers = layers,
                             .num_attention_heads = width / 64,
                             .num_key_value_heads = width / 128,
                             .max_position_embeddings = length};
  train(flags, world, {"LlamaDecoderLayer"}, [=] { return models::LlamaForCausalLM(config); },
        [=](models::LlamaForCausalLM& model) { return model->loss(tokens, targets); }, reports);
}

void run(const Flags& flags) {
  const auto world = init();
  if (std::getenv("TESSERA_DRY_RUN") == nullptr && !world.traits().traces) {
    // Makes libraries and thread pools allocate their memory before the measurement.
    auto small = flags;
    small.width = 128, small.layers = 1;
    train(small, world, /*reports=*/false);
  }
  train(flags, world, /*reports=*/true);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Trains a small model on the ranks that tessera launch has started.", "plan_train");
  Flags flags;
  app.add_option("--model", flags.model)->check(CLI::IsMember({"mlp", "gpt", "llama"}));
  app.add_option("--residence", flags.residence)->check(CLI::IsMember({"gathered", "node-shared"}));
  app.add_option("--width", flags.width);
  app.add_option("--layers", flags.layers);
  app.add_option("--batch", flags.batch);
  app.add_option("--length", flags.length);
  app.add_option("--lora", flags.lora);
  app.add_flag("--in-backward", flags.in_backward);
  app.add_flag("--checkpointing", flags.checkpointing);
  app.add_flag("--bf16", flags.bf16);
  return bench::run(app, argc, argv, [&] { run(flags); });
}
