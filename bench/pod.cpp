// Traces steps of a model that is too large for this host, to be compiled but not run: tessera xla compile --topology NAME -- bench_pod
// vit-10b. bench/pods runs it.
#include <fmt/format.h>
#include <tessera/models/llama.h>
#include <tessera/models/vit.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>

#include "bench.h"

namespace {

using namespace tessera;

const DeferredInitOptions kWithoutDraws = {.seed = 1};  // with a seed, making the model draws no random numbers
constexpr int kSteps = 3;  // the first step makes the optimizer's moments; the later steps have one program, which is compiled

struct Flags {
  std::string model = "vit-10b", dtype = "fp32";
  int zero = 3;
  int64_t batch = 8;
  bool checkpointing = false, barriers = true;
};

using bench::Subject, bench::Batch;

Subject vit(const models::VitOptions& options) {
  return bench::classifier(deferred_init([&] { return models::Vit(options); }, kWithoutDraws), {}, 1, options.classes, [=](int64_t count) {
    return torch::zeros({count, options.channels, options.image, options.image});
  });
}

Subject gpt(const models::GptOptions& options) {
  return bench::gpt(deferred_init([&] { return models::Gpt(options); }, kWithoutDraws), options, 1);
}

/// Llama 3 of 8 or of 70 billion parameters.
Subject llama(bool large) {
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
  return {.module = model.ptr(),
          .draw = [=](int64_t count) { return bench::draw_tokens(config.vocab_size, count, kLength); },
          .loss = [=](const Batch& drawn) mutable { return model->loss(drawn.inputs, drawn.targets); }};
}

Subject make_subject(const Flags& flags) {
  if (flags.model == "vit-10b") return vit(models::VitOptions::of_10b());
  if (flags.model == "vit-60b") return vit(models::VitOptions::of_60b());
  if (flags.model.starts_with("llama")) return llama(flags.model == "llama-70b");
  if (flags.model == "gpt-8b") return gpt({.vocabulary = 128'256, .width = 4096, .layers = 32, .heads = 32, .longest = 2048});
  return gpt({.vocabulary = 512, .width = 1024, .layers = 12, .heads = 16, .longest = 128});
}

void run(const Flags& flags) {
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
  const auto drawn = subject.draw(flags.batch);
  for (int step = 0; step < kSteps; step++) {
    subject.loss({on_all(drawn.inputs), on_all(drawn.targets)}).backward();
    optimizer.clip_grad_norm(1.0);
    optimizer.step();
    optimizer.zero_grad();
  }
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("A step of a large model, for the compiler of XLA devices", "bench_pod");
  Flags flags;
  app.add_option("MODEL", flags.model)->check(CLI::IsMember({"vit-10b", "vit-60b", "gpt-8b", "gpt-small", "llama-8b", "llama-70b"}));
  app.add_option("--dtype", flags.dtype, "The dtype in which parameters are gathered")->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--zero", flags.zero, "2 keeps gathered parameters from forward to backward")->check(CLI::Range(2, 3));
  app.add_option("--batch", flags.batch, "Samples of a device")->check(CLI::PositiveNumber);
  app.add_flag("--checkpointing", flags.checkpointing, "Compute the activations of a block again in backward");
  app.add_flag("--barriers,!--no-barriers", flags.barriers,
               "Tie gathers and sums of gradients to the computation by barriers; without them, the compiler chooses their time");
  return bench::run(app, argc, argv, [&] { run(flags); });
}
