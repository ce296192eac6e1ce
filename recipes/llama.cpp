// Trains a language model like Llama, from a Hugging Face folder, a GGUF file or nothing. How it is sharded comes from the configuration.
#include <fmt/format.h>
#include <tessera/base/atomic_write.h>
#include <tessera/base/folder.h>
#include <tessera/checkpoint/formats/hub.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <regex>

#include "llama_flags.h"

namespace {

using namespace tessera;
using Model = models::LlamaForCausalLM;

constexpr double kLeast = 1e-6;  // the least number of tokens to divide by

/// A row of a batch: its tokens and their places in their documents.
struct Batch {
  at::Tensor tokens, positions, targets;

  explicit Batch(const data::Samples& samples)
      : tokens(samples.inputs.select(1, 0)), positions(samples.inputs.select(1, 1)), targets(samples.targets) {}
  at::Tensor counted() const { return (targets != llm::kIgnored).sum(); }
};

struct Source {
  std::filesystem::path path;  // the path of a model, or of a folder that describes a new model
  models::LlamaConfig config;
  data::Tokenizer tokenizer;
  int64_t length;  // tokens in a row

  explicit Source(const Flags& flags)
      : path(flags.model.empty() ? flags.config : flags.model),
        config(llm::read_config(path)),
        tokenizer(llm::read_tokenizer(path)),
        length(flags.length > 0 ? flags.length : std::min<int64_t>(512, config.max_position_embeddings)) {
    if (flags.length > config.max_position_embeddings)
      throw ConfigError(
          fmt::format("--length {}: the model in {} takes at most {} tokens", flags.length, path.string(), config.max_position_embeddings));
  }
};

llm::PackedRows rows_of(const std::filesystem::path& file, const Flags& flags, const Source& source) {
  llm::TokenFile tokens(file);
  llm::expect_vocabulary(tokens, source.config.vocab_size);
  return {std::move(tokens), source.length, flags.packing};
}

using Settings = std::map<std::string, std::string>;

/// Converts flags to settings, which win over the configuration.
Settings settings_of(const Flags& flags) {
  Settings settings;
  if (!flags.method.empty()) settings["tessera_lora_dora"] = flags.method == "dora" ? "true" : "false";
  if (!flags.method.empty() && flags.method != "qlora") settings["tessera_quantisation"] = "no";
  if (flags.method == "full") settings["tessera_lora_r"] = "0";
  const auto set = [&](const char* key, const auto& flag) {
    if (flag) settings[key] = fmt::format("{}", *flag);
  };
  set("tessera_quantisation", flags.quantisation);
  set("tessera_lora_r", flags.rank);
  set("tessera_lora_alpha", flags.alpha);
  set("tessera_lora_dropout", flags.dropout);
  set("tessera_lora_target_modules", flags.target_modules);
  return settings;
}

/// Defaults of --method, for keys that neither flags nor the configuration set.
Settings defaults_of(const Flags& flags) {
  if (flags.method == "qlora") return {{"tessera_quantisation", "nf4"}, {"tessera_lora_r", "8"}};
  if (flags.method == "lora" || flags.method == "dora") return {{"tessera_lora_r", "8"}};
  return {};
}

/// Whether --method or the configuration has made adapters.
bool has_adapters(const Model& model) {
  return !lora::adapters(model).empty();
}

/// Throws ConfigError if flags, configuration and model do not fit together: --adapter without adapters, or adapters that can't be merged.
void expect_use(const Flags& flags, const models::LlamaConfig& config, const Model& model) {
  if (!has_adapters(model)) {
    if (!flags.adapter.empty())
      throw ConfigError(
          "--adapter FOLDER: neither --method nor the configuration makes adapters; give --method lora, or write the model by --output");
    for (const auto& module : model->modules()) {
      const auto* const linear = module->as<torch::nn::LinearImpl>();
      if (linear != nullptr && held_form(linear->weight) != nullptr)
        throw ConfigError("tessera_quantisation: quantised weights don't train; set tessera_lora_r, for adapters that train");
    }
    return;
  }
  if (flags.model.empty()) throw ConfigError("adapters need a model that has been trained; give --model PATH");
  if (flags.output.empty()) return;
  if (flags.adapter.empty())
    throw ConfigError("--output merges the adapters into the model; give --adapter FOLDER, too, where the adapters are saved");
  for (const auto& layer : lora::layers_of(model)) {
    if (config.tie_word_embeddings && layer.name.ends_with("embed_tokens"))
      throw ConfigError(fmt::format(
          "--output: '{}' shares its weight with the output layer, in which its adapter does nothing, so the adapter can't be merged; "
          "leave --output out, and use the adapter with the unmerged model",
          layer.name));
  }
}

/// Makes the units that --units names. Sets ShardOptions::start: weights are loaded after sharding, or all ranks draw the same weights.
void prepare_units(const Flags& flags, const Trainer& trainer, Model& model, ShardOptions& options) {
  options.start = flags.model.empty() ? Start::Equal : Start::Loaded;
  const auto units = llm::units_named(flags.units);
  if (trainer.settings().text("distributed_type") != "FSDP") return;
  llm::shard_experts(model, options);
  if (units != llm::Units::Root) llm::shard_ends(model, options, units);
}

/// Loads the model. Each rank reads only its own part of the weights.
void load(Model& model, const Flags& flags, Trainer& trainer) {
  checkpoint::load_weights(model, flags.model, {.may_be_missing = {".*\\.lora_.*"}, .may_be_unknown = model->surplus_names()});
  if (!has_adapters(model)) return;
  lora::reset_magnitudes(model);
  if (!flags.run.prefix.empty()) trainer.refer_to_base(flags.model);
}

double loss_over(Model& model, const llm::PackedRows& rows, const Flags& flags, Trainer& trainer) {
  data::Loader loader(trainer.make_sampler({.size = rows.size(),
                                            .global_batch = flags.batch_size * trainer.num_processes(),
                                            .order = data::Order::AsStored,
                                            .tail = data::Tail::Fill}),
                      rows, {.workers = flags.workers, .target_of_repeats = llm::kIgnored});
  auto sums = at::zeros({2}, torch::TensorOptions(trainer.world().traits().device).dtype(torch::kDouble));  // losses, and tokens
  for (const auto& samples : trainer.evaluation(model, loader)) {
    const Batch batch(samples);
    const auto loss = model->loss(batch.tokens, batch.targets, {.rows_at_once = flags.rows_at_once}, {.positions = batch.positions});
    sums += at::stack({loss * batch.counted(), batch.counted()}).to(sums.scalar_type());
  }
  sums = trainer.reduce(sums);
  return (sums[0] / sums[1]).item<double>();
}

/// Checks before training that the files of the output can be written.
void expect_places(const Flags& flags) {
  const auto expect_other = [](const char* flag, const std::filesystem::path& folder, const std::filesystem::path& used, const char* what) {
    if (!used.empty() && std::filesystem::weakly_canonical(used) == std::filesystem::weakly_canonical(folder))
      throw ConfigError(fmt::format("{} {} is {}; give another folder", flag, folder.string(), what));
  };
  if (!flags.adapter.empty()) {
    expect_other("--adapter", flags.adapter, flags.model, "the model that is trained on");
    expect_other("--adapter", flags.adapter, flags.output, "where the merged model goes");
    expect_other("--adapter", flags.adapter, flags.run.prefix, "the prefix of the checkpoints");
    checkpoint::expect_no_model(flags.adapter);
  }
  if (!flags.output.empty()) {
    expect_other("--output", flags.output, flags.model, "the model that is trained on");
    checkpoint::expect_free_for_model(flags.output);
  }
  if (!flags.adapter.empty()) {
    make_folder(flags.adapter);
    const NewFile trial(flags.adapter / checkpoint::kAdapterConfig);
  }
  if (flags.output.empty()) return;
  make_folder(flags.output);
  const NewFile trial(flags.output / "config.json");
  if (flags.gguf.empty()) return;
  if (flags.gguf.has_parent_path()) make_folder(flags.gguf.parent_path());
  if (flags.gguf.extension() != ".gguf")
    throw ConfigError(fmt::format("--gguf {}: the name of a GGUF file must end in .gguf", flags.gguf.string()));
  const NewFile other(flags.gguf);
}

/// Encodes the prompt as {1, tokens}, and refuses one that is too long before training begins.
at::Tensor prompt_of(const Flags& flags, const Source& source) {
  const auto prompt = source.tokenizer.encode(flags.prompt);
  const auto longest = source.config.max_position_embeddings;
  if (!flags.prompt.empty() && std::ssize(prompt) + flags.new_tokens > longest)
    throw ConfigError(fmt::format("--prompt with {} tokens and --max-new-tokens {} are longer than the {} of the model", prompt.size(),
                                  flags.new_tokens, longest));
  return at::tensor(std::vector<int64_t>(prompt.begin(), prompt.end()), at::kLong).unsqueeze(0);
}

void show_text(const char* when, Model& model, const Flags& flags, const Source& source, const at::Tensor& tokens, const Trainer& trainer,
               train::Run& run) {
  if (flags.prompt.empty()) return;
  const auto all = models::generate(*model, tokens.to(trainer.world().traits().device),
                                    {.most = flags.new_tokens,
                                     .temperature = flags.temperature,
                                     .top_p = flags.top_p,
                                     .vocabulary = source.tokenizer.size(),
                                     .seed = flags.seed,
                                     .ends = source.config.eos_token_ids})
                       .flatten()
                       .to(at::kCPU, at::kInt);
  const auto text = source.tokenizer.decode({all.const_data_ptr<int32_t>(), static_cast<size_t>(all.numel())});
  run.say(fmt::format("{} training: {}", when, text));
}

void save_adapter(const Model& model, const Flags& flags, const Trainer& trainer) {
  checkpoint::save_adapter(model, flags.adapter, trainer.world(), {.base = flags.model, .task_type = "CAUSAL_LM"});
}

void write(Model& model, const Flags& flags, const Source& source, Trainer& trainer, train::Run& run) {
  if (!has_adapters(model)) trainer.save_model(model, flags.output);
  if (trainer.is_main_process()) {
    if (has_adapters(model)) checkpoint::merge_adapter(flags.model, flags.adapter, flags.output);
    source.config.write(flags.output, llm::dtype_of_weights(flags.output));
    source.tokenizer.write(flags.output);
    if (!flags.gguf.empty()) llm::write_gguf(flags.output, flags.gguf, {.code = flags.gguf_code});
  }
  run.say(fmt::format("wrote the model to {}{}", flags.output.string(), flags.gguf.empty() ? "" : " and " + flags.gguf.string()));
}

/// Groups parameters so that norms and biases do not decay, as in Hugging Face's Trainer.
std::vector<optim::ParameterGroup> groups_of(const Model& model) {
  static const std::regex kept("bias|layernorm|rmsnorm|(^|\\.)norm($|\\.)|_norm($|\\.)");
  std::vector<optim::ParameterGroup> groups = {{}, {.parameters = {}, .weight_decay = 0}};
  for (const auto& [name, parameter] : named_parameters(*model)) groups[std::regex_search(name, kept) ? 1 : 0].parameters.push_back(parameter);
  return groups;
}

std::unique_ptr<optim::Optimizer> make_optimizer(const Flags& flags, const Model& model) {
  const optim::AdamWOptions options{.lr = flags.lr, .beta2 = 0.95, .weight_decay = flags.weight_decay};
  if (flags.optimizer == "adamw8bit") return std::make_unique<optim::AdamW8bit>(groups_of(model), options);
  return std::make_unique<optim::AdamW>(groups_of(model), options);
}

int train_model(const Flags& flags) {
  Model model = nullptr;
  Trainer trainer({.settings = settings_of(flags),
                   .defaults = defaults_of(flags),
                   .adjust_sharding = [&](ShardOptions& options) { prepare_units(flags, trainer, model, options); },
                   .log_with = flags.metrics});
  const Source source(flags);
  const auto rows = rows_of(flags.data, flags, source);
  const auto eval_rows = flags.eval_data.empty() ? std::nullopt : std::optional(rows_of(flags.eval_data, flags, source));
  const auto prompt = prompt_of(flags, source);
  if (!flags.gguf.empty()) llm::expect_gguf_place(source.config, source.tokenizer, source.path);
  trainer.set_seed(flags.seed);
  model = deferred_init([&] { return Model(source.config); }, {.seed = flags.seed});
  trainer.prepare(model);
  expect_use(flags, source.config, model);
  trainer.main_process_first([&] {
    if (trainer.is_main_process()) expect_places(flags);
  });
  if (!flags.model.empty()) load(model, flags, trainer);
  data::Loader loader(
      trainer.make_sampler(
          {.size = rows.size(), .global_batch = flags.batch_size * trainer.num_processes(), .tail = data::Tail::Fill, .seed = flags.seed}),
      rows, {.workers = flags.workers, .target_of_repeats = llm::kIgnored, .data = rows.data()});
  const auto all = *flags.run.epochs * trainer.steps_of_epoch(loader), steps = std::min(all, flags.run.steps.value_or(all));
  const optim::LearningRate rate{.base = flags.lr,
                                 .shape = optim::LearningRate::Shape::Cosine,
                                 .warmup = static_cast<int64_t>(flags.warmup * static_cast<double>(steps)),
                                 .steps = std::max<int64_t>(steps, 1)};
  const auto made = make_optimizer(flags, model);
  auto& optimizer = *made;
  trainer.prepare(optimizer, loader, rate);

  const auto passes = trainer.settings().integer("gradient_accumulation_steps");
  auto learned = torch::zeros({}, trainer.world().traits().device);  // learned tokens of this step so far, the mean over the ranks
  train::Run run(trainer, loader, flags.run);
  if (!flags.model.empty()) show_text("before", model, flags, source, prompt, trainer, run);
  bool is_kept = false;  // whether the present adapters are saved
  while (run.next_epoch()) {
    for (const auto& samples : run.batches()) {
      const auto accumulation = trainer.accumulate();
      const Batch batch(samples);
      // The mean over a step's learned tokens, whose number may differ between ranks and passes.
      const auto own = batch.counted().to(torch::kFloat), counted = trainer.reduce(own, Reduce::Mean);
      const auto divisor = passes == 1 ? counted.clamp_min(kLeast) : torch::full_like(counted, batch.targets.numel());
      const auto share =
          model->loss(batch.tokens, batch.targets, {.z_loss = flags.z_loss, .rows_at_once = flags.rows_at_once, .divisor = divisor},
                      {.positions = batch.positions});
      trainer.backward(share);
      learned += counted;
      if (trainer.sync_gradients()) {
        if (passes > 1) optimizer.scale_gradients(divisor * passes / learned.clamp_min(kLeast));
        learned.zero_();
      }
      const auto loss = share.detach() * divisor / own.clamp_min(kLeast);
      const auto norm = flags.clip > 0 ? trainer.clip_grad_norm(flags.clip) : trainer.grad_norm();
      trainer.step();
      run.report({{"loss", loss, own}, {"grad_norm", norm}});
    }
    if (run.stopped()) return 0;
    if (!flags.adapter.empty()) save_adapter(model, flags, trainer);
    is_kept = true;
    if (!eval_rows) continue;
    const auto loss = loss_over(model, *eval_rows, flags, trainer);
    trainer.log({{"eval_loss", loss}});
    run.say(fmt::format("epoch {}: loss {:.4f}, perplexity {:.2f}", run.epoch(), loss, std::exp(loss)));
  }
  if (run.stopped()) return 0;
  if (!flags.adapter.empty()) {
    if (!is_kept) save_adapter(model, flags, trainer);  // not saved yet if the run has resumed at its end
    run.say(fmt::format("wrote the adapters to {}", flags.adapter.string()));
  }
  if (!flags.output.empty()) write(model, flags, source, trainer, run);
  show_text("after", model, flags, source, prompt, trainer, run);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  cli::Program app("Trains a language model like Llama. How it is sharded comes from the configuration.", "llama",
                   {"tessera data tokenize notes.txt --tokenizer SmolLM2 --out notes.tokens",
                    "tessera launch -n 2 llama --model SmolLM2 --data notes.tokens --output tuned",
                    "llama --model SmolLM2 --data notes.tokens --method qlora --adapter adapter"});
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return train_model(flags); });
}
