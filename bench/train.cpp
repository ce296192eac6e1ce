// Trains one of the benchmarks' models on random data, and prints time and memory of a step as one line of JSON. bench/compare and
// bench/gpu run it, and measure the same with other systems.
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <tessera/llm/units.h>
#include <tessera/models/llama.h>
#include <tessera/models/mlp.h>
#include <tessera/models/mnist.h>
#include <tessera/models/resnet.h>
#include <tessera/models/vit.h>
#include <tessera/nn/lora.h>
#include <tessera/nn/quantize.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <atomic>
#include <nlohmann/json.hpp>

#include "bench.h"

namespace {

using namespace tessera;
using bench::Batch, bench::Subject, bench::Clock, bench::members, bench::median, bench::or_else;

struct Flags : bench::TrainingFlags {
  std::string residence = "auto", device = "cpu", optimizer = "tessera";
  int64_t heads = 8, length = 256;
  bool whole = false, in_backward = false, narrow_parameters = false, checkpointing = false, whole_scores = false, state_on_disk = false,
       lora = false, qlora = false, evaluates = false, experts_with_layer = false, adamw8bit = false, by_host = false;
  int zero = 3;

  bool is_narrow() const { return dtype == "bf16"; }
  /// Whether the model gets its activations in bfloat16.
  bool takes_narrow() const { return is_narrow() && (!whole || narrow_parameters); }
  torch::Dtype stored() const { return is_narrow() && narrow_parameters ? torch::kBFloat16 : torch::kFloat; }
};

/// The shape of SmolLM2, unless it is given.
models::LlamaConfig llama_config(const Flags& flags) {
  const auto width = or_else(flags.width, 576);
  return {.vocab_size = 49152,
          .hidden_size = width,
          .intermediate_size = width / 3 * 8,
          .num_hidden_layers = or_else(flags.layers, 30),
          .num_attention_heads = width / 64,
          .num_key_value_heads = width / 192,
          .max_position_embeddings = std::max<int64_t>(flags.length, 2048),
          .tie_word_embeddings = true,
          .rope = {.theta = 100000}};
}

/// Eight experts of which a token uses two, as in Mixtral, or 64 small ones of which it uses four.
models::LlamaConfig experts_config(const Flags& flags) {
  const auto width = or_else(flags.width, 512);
  const bool is_mixtral = flags.model == "mixtral";
  return {.model_type = is_mixtral ? "mixtral" : "qwen3_moe",
          .vocab_size = 32000,
          .hidden_size = width,
          .intermediate_size = 3 * width,
          .num_hidden_layers = or_else(flags.layers, 8),
          .num_attention_heads = width / 64,
          .num_key_value_heads = width / 256,
          .max_position_embeddings = std::max<int64_t>(flags.length, 2048),
          .tie_word_embeddings = true,
          .experts = models::ExpertOptions{.num_experts = is_mixtral ? 8 : 64,
                                           .num_experts_per_tok = is_mixtral ? 2 : 4,
                                           .intermediate_size = is_mixtral ? 3 * width : width / 2}};
}

Subject make_subject(const Flags& flags) {
  torch::manual_seed(0);
  const bool narrow = flags.takes_narrow();
  if (flags.model == "mlp") {
    const auto width = or_else(flags.width, 2048);
    models::Mlp model(models::MlpOptions{.width = width, .layers = or_else(flags.layers, 8)});
    return bench::classifier(model, members(model->blocks), 32, 16, [width, narrow](int64_t count) {
      return torch::randn({count, width}).to(narrow ? torch::kBFloat16 : torch::kFloat);
    });
  }
  if (flags.model == "cnn") {
    models::MnistNet model;
    return bench::classifier(model, {model->conv1.ptr(), model->conv2.ptr(), model->fc1.ptr()}, 128, 10, [](int64_t count) {
      return torch::randn({count, 1, 28, 28});
    });
  }
  if (flags.model == "resnet50") {
    models::ResNet model(models::ResNetOptions::resnet50());
    std::vector<std::shared_ptr<torch::nn::Module>> blocks;
    for (const auto& layer : model->layers) {
      for (const auto& block : *layer) blocks.push_back(block.ptr());
    }
    return bench::classifier(model, blocks, 8, 1000, [](int64_t count) { return torch::randn({count, 3, 224, 224}); });
  }
  if (flags.model == "vit") {  // ViT-S/16, unless its sizes are given
    const auto width = or_else(flags.width, 384);
    models::Vit model(models::VitOptions{.width = width, .layers = or_else(flags.layers, 12), .heads = width / 64});
    return bench::classifier(model, members(model->blocks), 4, 1000, [narrow](int64_t count) {
      return torch::randn({count, 3, 224, 224}).to(narrow ? torch::kBFloat16 : torch::kFloat);
    });
  }
  if (flags.model == "llama" || flags.model == "mixtral" || flags.model == "qwen_moe") {
    const auto config = flags.model == "llama" ? llama_config(flags) : experts_config(flags);
    models::LlamaForCausalLM model(config);
    return {.module = model.ptr(),
            .units = members(model->model->layers),
            .batch = 2,
            .draw = [length = flags.length, words = config.vocab_size](int64_t count) { return bench::draw_tokens(words, count, length); },
            .loss =
                [model, whole = flags.whole_scores](const Batch& drawn) mutable {
                  if (!whole) return model->loss(drawn.inputs, drawn.targets);
                  return torch::cross_entropy_loss(model(drawn.inputs).to(torch::kFloat).flatten(0, 1), drawn.targets.flatten());
                },
            .shard_first =
                [model, apart = !flags.experts_with_layer](const ShardOptions& options) mutable {
                  if (apart) llm::shard_experts(model, options);
                }};
  }
  const models::GptOptions options{
      .width = or_else(flags.width, 512), .layers = or_else(flags.layers, 8), .heads = flags.heads, .longest = flags.length};
  // Skips the usual start values, which take the host longer than all steps; set_start_values() draws others later.
  auto model = deferred_init([&] {
    models::Gpt made(options);
    made->to(flags.stored());
    return made;
  });
  materialize(model, [](const std::string&, at::Tensor&) {});
  return bench::gpt(model, options, 4);
}

/// Draws a GPT's start values on its device, the same for all systems that are compared.
void set_start_values(const torch::nn::Module& gpt) {
  const torch::NoGradGuard no_grad;
  torch::manual_seed(0);
  for (const auto& item : gpt.named_parameters()) {
    if (item.value().dim() > 1) {
      item.value().normal_(0, 0.02);
    } else {
      item.value().fill_(item.key().ends_with("bias") ? 0 : 1);
    }
  }
}

/// An optimizer of Tessera, or of plain libtorch.
struct AnyOptimizer {
  std::function<void()> step, zero_grad;
};

/// libtorch's fastest AdamW, as Python's with fused=True: all parameters in one call.
class FusedAdamW {
 public:
  explicit FusedAdamW(std::vector<at::Tensor> parameters) : parameters_(std::move(parameters)) {
    for (const auto& parameter : parameters_) {
      first_.push_back(at::zeros_like(parameter));
      second_.push_back(at::zeros_like(parameter));
      steps_.push_back(at::zeros({}, parameter.options().dtype(at::kFloat).requires_grad(false)));
    }
  }

  void step() {
    const torch::NoGradGuard no_grad;
    std::vector<at::Tensor> gradients;
    for (const auto& parameter : parameters_) gradients.push_back(parameter.grad());
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients, first_, second_, {}, steps_, /*lr=*/1e-4, /*beta1=*/0.9, /*beta2=*/0.999,
                      /*weight_decay=*/1e-2, /*eps=*/1e-8, /*amsgrad=*/false, /*maximize=*/false);
  }
  void zero_grad() {
    for (const auto& parameter : parameters_) parameter.mutable_grad() = at::Tensor();
  }

 private:
  std::vector<at::Tensor> parameters_, first_, second_, steps_;
};

template <class Optimizer>
AnyOptimizer any(std::shared_ptr<Optimizer> optimizer) {
  return {.step = [optimizer] { optimizer->step(); }, .zero_grad = [optimizer] { optimizer->zero_grad(); }};
}

AnyOptimizer make_optimizer(const Flags& flags, const torch::nn::Module& module) {
  if (flags.optimizer == "torch") return any(std::make_shared<torch::optim::AdamW>(module.parameters(), torch::optim::AdamWOptions(1e-4)));
  if (flags.optimizer == "fused") return any(std::make_shared<FusedAdamW>(module.parameters()));
  const optim::AdamWOptions options{.lr = 1e-4};
  std::shared_ptr<optim::Optimizer> optimizer = std::make_shared<optim::AdamW>(parameters(module), options);
  if (flags.adamw8bit) optimizer = std::make_shared<optim::AdamW8bit>(parameters(module), options);
  if (flags.state_on_disk) optimizer->offload_state(OffloadTo::Disk, {.folder = "."});
  if (flags.in_backward) optimizer->step_in_backward();
  return any(std::move(optimizer));
}

/// Waits until the device has finished all queued work.
void synchronize(c10::Device device) {
  if (!device.is_cpu()) c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
}

/// Counts the operators that the program calls, but not the operators that these call in turn.
class OperatorCount {
 public:
  OperatorCount() {
    count_ = 0;
    handle_ = at::addGlobalCallback(at::RecordFunctionCallback(begin, end).scopes({at::RecordScope::FUNCTION}));
  }
  ~OperatorCount() { at::removeCallback(handle_); }
  static int64_t value() { return count_; }

 private:
  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& /*operation*/) {
    if (depth_++ == 0) count_++;
    return nullptr;
  }
  static void end(const at::RecordFunction& /*operation*/, at::ObserverContext* /*context*/) { depth_--; }

  inline static std::atomic<int64_t> count_ = 0;
  inline static thread_local int depth_ = 0;
  at::CallbackHandle handle_;
};

double milliseconds(Clock::time_point begin) {
  return 1e3 * bench::seconds_since(begin);
}

/// Bytes that this rank has sent in the world and in the groups that a mesh has made of it: all, or those to other hosts.
uint64_t bytes_sent(const Communicator& world, uint64_t Traffic::* which) {
  uint64_t all = 0;
  for (const auto operation : {Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce}) all += world.traffic(operation).*which;
  for (const auto& part : world.parts()) all += bytes_sent(part, which);
  return all;
}

/// Milliseconds of a step.
struct Times {
  double all = 0;
  double pass = 0;    // until forward and backward have returned; a device may still compute
  double queued = 0;  // until all calls have returned
};

template <double Times::* field>
double median_of(const std::vector<Times>& times) {
  std::vector<double> values;
  for (const auto& each : times) values.push_back(each.*field);
  return median(std::move(values));
}

void run(const Flags& flags) {
  const auto kind = c10::Device(flags.device).type();
  const auto device = kind == c10::kCPU ? c10::Device(kind) : c10::Device(kind, static_cast<c10::DeviceIndex>(local_rank()));
  const auto world = flags.whole ? self_world() : init({.device = device});
  auto subject = make_subject(flags);
  subject.module->to(device, flags.stored());
  if (flags.qlora) nn::quantize(*subject.module);
  if (flags.lora || flags.qlora) lora::apply(*subject.module, {.r = 8});
  if (flags.model == "gpt") set_start_values(*subject.module);
  size_t parameter_bytes = 0;
  for (const auto& parameter : subject.module->parameters()) parameter_bytes += parameter.nbytes();
  if (!flags.whole) {
    ShardOptions options{.mesh = flags.by_host ? Mesh::by_host(world) : Mesh(world)};
    if (flags.zero == 2) options.reshard_after_forward = false;
    if (flags.is_narrow() && !flags.narrow_parameters) options.mixed_precision.param_dtype = torch::kBFloat16;
    if (flags.residence == "gathered") options.residence = Residence::Gathered;
    if (flags.residence == "node-shared") options.residence = Residence::NodeShared;
    if (subject.shard_first) subject.shard_first(options);
    for (const auto& unit : subject.units) {
      if (flags.checkpointing) activation::checkpoint_module(unit);
      fully_shard(unit, options);
    }
    fully_shard(subject.module, options);
  }
  auto optimizer = make_optimizer(flags, *subject.module);
  const auto batch_size = or_else(flags.batch, subject.batch);
  torch::manual_seed(1 + world.rank());
  // With plain libtorch, autocast is the usual way to lower precision.
  const bool autocast = flags.whole && flags.is_narrow() && !flags.narrow_parameters;
  at::autocast::set_autocast_enabled(kind, autocast);
  const auto draw = [&] {
    const auto [inputs, targets] = subject.draw(batch_size);
    return Batch{inputs.to(device), targets.to(device)};
  };
  const auto pass = [&](const Batch& drawn) {
    const c10::AutoGradMode mode(!flags.evaluates);
    const auto value = subject.loss(drawn);
    if (autocast) at::autocast::clear_cache();
    if (!flags.evaluates) value.backward();
    return value.detach();
  };
  const auto update = [&] {
    if (flags.evaluates) return;
    optimizer.step();
    optimizer.zero_grad();
  };
  std::vector<Times> times;
  at::Tensor loss;
  int64_t operators = 0;
  for (int step = 0; step < flags.warmup + flags.steps; step++) {
    const auto drawn = draw();
    std::optional<OperatorCount> count;
    if (step == 0 && flags.warmup > 0) count.emplace();
    if (step == flags.warmup) {
      world.reset_traffic();
      for (const auto& part : world.parts()) part.reset_traffic();
      if (kind != c10::kCPU) c10::getDeviceAllocator(kind)->resetPeakStats(device.index());
    }
    world.barrier();
    synchronize(device);
    const auto begin = Clock::now();
    Times taken;
    loss = pass(drawn);
    taken.pass = milliseconds(begin);
    if (count) operators = count->value();
    count.reset();
    update();
    taken.queued = milliseconds(begin);
    world.barrier();
    synchronize(device);
    taken.all = milliseconds(begin);
    if (step >= flags.warmup) times.push_back(taken);
    if (step == 0 && world.rank() == 0) fmt::print(stderr, "first step done\n");
  }
  nlohmann::json row = {{"system", flags.whole ? "libtorch" : "tessera"},
                        {"model", flags.model},
                        {"dtype", flags.dtype},
                        {"world", world.size()},
                        {"median_ms", median_of<&Times::all>(times)},
                        {"min_ms", std::ranges::min(times, {}, &Times::all).all},
                        {"pass_ms", std::ranges::min(times, {}, &Times::pass).pass},
                        {"queued_ms", median_of<&Times::queued>(times)},
                        {"bytes_per_step", bytes_sent(world, &Traffic::bytes) / static_cast<uint64_t>(std::max(1, flags.steps))},
                        {"operators", operators}};
  if (kind != c10::kCPU) {
    // Measures steps as in training, where the host does not wait for the device between steps.
    std::vector<Batch> batches;
    for (int step = 0; step < flags.steps; step++) batches.push_back(draw());
    synchronize(device);
    const auto begin = Clock::now();
    for (const auto& drawn : batches) {
      loss = pass(drawn);
      update();
    }
    synchronize(device);
    row["running_ms"] = milliseconds(begin) / flags.steps;
    const auto stats = c10::getDeviceAllocator(kind)->getDeviceStats(device.index());
    row["peak_mb"] = static_cast<double>(stats.allocated_bytes[0].peak) / 1e6;  // the first is the sum over all pools
    row["reserved_mb"] = static_cast<double>(stats.reserved_bytes[0].peak) / 1e6;
  }
  const auto across = static_cast<double>(bytes_sent(world, &Traffic::across));
  row["across_per_step"] = bench::over_ranks(world, across, Reduce::Sum, flags.whole ? c10::kCPU : device) / std::max(1, flags.steps);
  row["parameter_bytes"] = parameter_bytes;
  row["pss_mb"] = bench::over_ranks(world, bench::own_megabytes(), Reduce::Sum, flags.whole ? c10::kCPU : device);
  row["loss"] = loss.item<double>();
  if (world.rank() == 0) fmt::print("{}\n", row.dump());
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Times training steps of a model, sharded over the ranks that tessera launch or torchrun have started.", "bench_train");
  Flags flags;
  flags.add_to(app, {"gpt", "llama", "mixtral", "qwen_moe", "mlp", "cnn", "resnet50", "vit"});
  app.add_option("--residence", flags.residence)->check(CLI::IsMember({"auto", "gathered", "node-shared"}))->capture_default_str();
  app.add_option("--zero", flags.zero, "2 keeps gathered parameters from forward to backward")->check(CLI::Range(2, 3))->capture_default_str();
  app.add_option("--device", flags.device, "Such as cuda")->capture_default_str();
  app.add_option("--optimizer", flags.optimizer, "AdamW of Tessera, torch::optim, or libtorch's operator for all parameters at once")
      ->check(CLI::IsMember({"tessera", "torch", "fused"}))
      ->capture_default_str();
  app.add_flag("--narrow-parameters", flags.narrow_parameters, "Parameters, gradients and the optimizer's state in --dtype, too");
  app.add_option("--heads", flags.heads, "Of gpt")->check(CLI::Range(1, 1'000))->capture_default_str();
  app.add_option("--length", flags.length, "Of gpt, llama, mixtral and qwen_moe, in tokens")->check(CLI::Range(1, 1'000'000))->capture_default_str();
  app.add_flag("--experts-with-layer", flags.experts_with_layer, "Of mixtral and qwen_moe: experts belong to the unit of their layer");
  app.add_flag("--evaluate", flags.evaluates, "Only passes without gradients");
  app.add_flag("--whole", flags.whole, "One process, not sharded");
  app.add_flag("--by-host", flags.by_host, "Shards within each host, and replicas across hosts")->excludes("--whole");
  app.add_flag("--checkpointing", flags.checkpointing, "Compute the activations of a unit again in backward")->excludes("--whole");
  app.add_flag("--lora", flags.lora, "Train only adapters of rank 8 in all linear layers");
  app.add_flag("--qlora", flags.qlora, "As --lora, with frozen weights in NF4");
  app.add_flag("--adamw8bit", flags.adamw8bit, "The optimizer's moments in eight bits");
  app.add_flag("--whole-scores", flags.whole_scores, "Of llama: the scores of all tokens at once");
  app.add_flag("--state-on-disk", flags.state_on_disk, "The optimizer's state in files of the working folder")->excludes("--whole");
  app.add_flag("--step-in-backward", flags.in_backward, "Update each unit while backward runs")->excludes("--whole");
  return bench::run(app, argc, argv, [&] {
    const bool is_ours = flags.optimizer == "tessera";
    if (!is_ours && (flags.state_on_disk || flags.in_backward || flags.adamw8bit))
      throw ConfigError("--state-on-disk, --step-in-backward and --adamw8bit need --optimizer tessera");
    if (flags.whole_scores && flags.model != "llama" && flags.model != "mixtral")
      throw ConfigError("--whole-scores needs --model llama or mixtral");
    run(flags);
  });
}
