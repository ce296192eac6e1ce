// A step of a model that no host here could hold, for a pod's compiler: tessera xla compile --topology NAME -- bench_pod vit-10b.
// bench/pods runs it.
#include <fmt/format.h>
#include <tessera/models/gpt.h>
#include <tessera/models/llama.h>
#include <tessera/models/vit.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <functional>

namespace {

using namespace tessera;

const DeferredInitOptions kWithoutDraws = {.seed = 1};  // the generator draws nothing ahead
constexpr int kSteps = 3;  // the first makes moments, and the compiler takes the program that comes twice

struct Flags {
  std::string model = "vit-10b", dtype = "fp32";
  int zero = 3;
  int64_t batch = 8;
  bool checkpointing = false, barriers = true;
};

/// A model without values, and its loss for the batch of one rank.
struct Subject {
  std::shared_ptr<torch::nn::Module> module;
  at::Tensor inputs, targets;
  std::function<at::Tensor(const at::Tensor& inputs, const at::Tensor& targets)> loss;
};

Subject vit(const models::VitOptions& options, int64_t batch) {
  auto model = deferred_init([&] { return models::Vit(options); }, kWithoutDraws);
  return {model.ptr(), torch::zeros({batch, options.channels, options.image, options.image}), torch::zeros({batch}, torch::kLong),
          [=](const at::Tensor& images, const at::Tensor& classes) mutable { return torch::cross_entropy_loss(model(images).to(torch::kFloat), classes); }};
}

Subject gpt(const models::GptOptions& options, int64_t batch) {
  auto model = deferred_init([&] { return models::Gpt(options); }, kWithoutDraws);
  const auto tokens = torch::zeros({batch, options.longest}, torch::kLong);
  return {model.ptr(), tokens, tokens, [=](const at::Tensor& inputs, const at::Tensor& targets) mutable {
            return torch::cross_entropy_loss(model(inputs).to(torch::kFloat).flatten(0, 1), targets.flatten());
          }};
}

/// Llama 3 of 8 or of 70 billion parameters.
Subject llama(bool large, int64_t batch) {
  constexpr int64_t kLength = 2048;
  const models::LlamaConfig config{.vocab_size = 128'256,
                                   .hidden_size = large ? 8192 : 4096,
                                   .intermediate_size = large ? 28'672 : 14'336,
                                   .num_hidden_layers = large ? 80 : 32,
                                   .num_attention_heads = large ? 64 : 32,
                                   .num_key_value_heads = 8,
                                   .max_position_embeddings = 8192,
                                   .rope = {.theta = 500'000}};
  auto model = deferred_init([&] { return models::LlamaForCausalLM(config); }, kWithoutDraws);
  const auto tokens = torch::zeros({batch, kLength}, torch::kLong);
  return {model.ptr(), tokens, tokens,
          [=](const at::Tensor& inputs, const at::Tensor& targets) mutable { return model->loss(inputs, targets); }};
}

Subject make_subject(const Flags& flags) {
  if (flags.model == "vit-10b") return vit(models::VitOptions::of_10b(), flags.batch);
  if (flags.model == "vit-60b") return vit(models::VitOptions::of_60b(), flags.batch);
  if (flags.model.starts_with("llama")) return llama(flags.model == "llama-70b", flags.batch);
  if (flags.model == "gpt-8b") return gpt({.vocabulary = 128'256, .width = 4096, .layers = 32, .heads = 32, .longest = 2048}, flags.batch);
  return gpt({.vocabulary = 512, .width = 1024, .layers = 12, .heads = 16, .longest = 128}, flags.batch);
}

int run(const Flags& flags) {
  const auto world = init();
  const auto subject = make_subject(flags);
  const bool is_llama = flags.model.starts_with("llama"), is_vit = flags.model.starts_with("vit");
  const auto blocks = wrap_classes({is_llama ? "LlamaDecoderLayer" : is_vit ? "VitBlock" : "GptBlock"});
  if (flags.checkpointing) activation::checkpoint_modules(*subject.module, blocks);
  ShardOptions options{.mesh = world};
  if (flags.zero == 2) options.reshard_after_forward = false;
  if (!flags.barriers) options.schedule.tracing = {.barrier_in_forward = false, .barrier_in_backward = false};
  if (flags.dtype == "bf16") options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kBFloat16};
  fully_shard(subject.module, options, blocks);
  optim::AdamW optimizer(parameters(*subject.module), {.lr = 1e-4});
  const auto on_all = [&](const at::Tensor& of_one) {
    return world.from_replicas(std::vector<at::Tensor>(world.local_ranks().size(), of_one));
  };
  for (int step = 0; step < kSteps; step++) {
    subject.loss(on_all(subject.inputs), on_all(subject.targets)).backward();
    optimizer.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A step of a large model, for the compiler of XLA devices");
  Flags flags;
  app.add_option("MODEL", flags.model)->check(CLI::IsMember({"vit-10b", "vit-60b", "gpt-8b", "gpt-small", "llama-8b", "llama-70b"}));
  app.add_option("--dtype", flags.dtype, "In which parameters are gathered")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--zero", flags.zero, "2 keeps gathered parameters from forward to backward")->check(CLI::Range(2, 3));
  app.add_option("--batch", flags.batch, "Samples of a device")->check(CLI::PositiveNumber);
  app.add_flag("--checkpointing", flags.checkpointing, "Compute the activations of a block again in backward");
  app.add_flag("--barriers,!--no-barriers", flags.barriers, "Tie gathers and sums of gradients to what is computed; else the compiler places them as it likes");
  CLI11_PARSE(app, argc, argv);
  try {
    return run(flags);
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_pod: {}\n", error.what());
    return 1;
  }
}
