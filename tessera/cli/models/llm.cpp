// `tessera llm`: uses language models.
#include "tessera/cli/models/llm.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"
#include "tessera/base/move_module.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/packages.h"
#include "tessera/comm/init.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/units.h"
#include "tessera/nn/lora.h"
#include "tessera/nn/quantize.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/wrap.h"

namespace tessera::cli {
namespace {

using Json = nlohmann::json;
using Clock = std::chrono::steady_clock;
constexpr std::string_view kUnfinished = "\uFFFD";  // how decode() shows the first bytes of a character
constexpr size_t kContext = 8;                      // how many tokens of the prompt are decoded with an answer

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

/// Returns generation_config.json, in which a model's authors recommend how tokens are drawn; an empty object if there is none.
Json generation_config(const std::filesystem::path& model) {
  const auto path = model / "generation_config.json";
  if (!is_folder(model) || !is_there(path)) return Json::object();
  auto json = Json::parse(InputFile(path).read_all(), nullptr, /*allow_exceptions=*/false);
  if (!json.is_object()) throw IoError("{} is damaged: it is not a JSON object", path);
  return json;
}

models::LlamaConfig config_of(const std::filesystem::path& model) {
  if (!is_there(model))
    throw ConfigError("there is no model {}; give a folder of the Hugging Face Hub that is on this disk, or a GGUF file", model);
  return llm::read_config(model);
}

models::LlamaForCausalLM loaded(const ModelFlags& flags, const models::LlamaConfig& config, const c10::Device& device) {
  const auto dtype = flags.dtype == "auto" ? llm::dtype_of_weights(flags.model) : dtype_of(flags.dtype);
  std::vector<std::string> adapters;
  std::vector<lora::Options> options;
  for (const auto& folder : flags.adapters) options.push_back(checkpoint::read_adapter_config(folder));
  auto model = deferred_init([&] {
    models::LlamaForCausalLM made(config);
    made->to(dtype);
    return made;
  });
  if (!flags.quantisation.empty()) nn::quantize(model, {.quantization = nn::quantization_named(flags.quantisation)});
  for (const auto& each : options) lora::apply(model, each, adapters.emplace_back(fmt::format("adapter{}", adapters.size())));
  move_module(*model, device);
  llm::shard_experts(model, {.start = Start::Loaded});
  fully_shard(model, {.start = Start::Loaded}, wrap_classes({"LlamaDecoderLayer"}));
  checkpoint::load_weights(model, flags.model, {.may_be_missing = {".*\\.lora_.*"}, .may_be_unknown = model->surplus_names()});
  for (size_t i = 0; i < adapters.size(); i++) checkpoint::load_adapter(model, flags.adapters[i], adapters[i]);
  if (!adapters.empty()) lora::set_adapters(model, adapters);
  model->eval();
  return model;
}

void add_llm(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("llm", "Uses language models: chats, continues texts, measures perplexity")->require_subcommand(1);
  command->footer(Help::footer_of({"tessera llm chat SmolLM2-135M-Instruct", "tessera launch -n 2 tessera llm generate my.gguf --prompt 'Once upon'"},
                                  "The device is that of TESSERA_DEVICE: cpu, cuda or xla. Under tessera launch, each rank has a part of the model."));
  add_llm_chat(*command, chosen);
  add_llm_generate(*command, chosen);
  add_llm_eval(*command, chosen);
}

const AddedCommand llm_command("llm", add_llm);

}  // namespace

void add_model_flags(CLI::App& command, ModelFlags& flags) {
  command.add_option("MODEL", flags.model, "The model: a Hugging Face folder, or a GGUF file")->required();
  command.add_option("--adapter", flags.adapters, "An adapter of this model, as peft writes it; may be repeated: their effects add up")
      ->type_name("FOLDER")
      ->allow_extra_args(false);
  command.add_option("--dtype", flags.dtype, "The dtype of the weights; auto: as in the files, float32 where they are quantized")
      ->capture_default_str()
      ->check(one_of({"auto", "float32", "bfloat16", "float16"}));
  command.add_option("--quantisation", flags.quantisation, "Hold the weights of linear layers in few bits, for a model that is too large otherwise")
      ->check(one_of({"nf4", "nf4_single", "int8", "fp8"}));
}

void add_chat_flag(CLI::App& command, std::string& chat) {
  command.add_option("--chat", chat, "The template of conversations: chatml, llama3, alpaca or a file .jinja; the model's own unless given")
      ->type_name("NAME");
}

std::optional<llm::ChatTemplate> chat_template(const std::string& chat, const std::filesystem::path& model) {
  if (chat.empty()) return llm::ChatTemplate::found_in(model);
  return chat.ends_with(".jinja") ? llm::ChatTemplate::of(model, chat) : llm::ChatTemplate::named(chat);
}

void add_end_flag(CLI::App& command, std::string& end) {
  command.add_option("--end", end, "The token that ends a document, or none; that of the model unless given")->type_name("TOKEN");
}

std::optional<int32_t> end_token(const std::string& end, const data::Tokenizer& tokenizer, const std::filesystem::path& model) {
  if (end == "none") return {};
  if (!end.empty()) {
    const auto id = tokenizer.find(end);
    if (!id) throw ConfigError("--end {}: the tokenizer has no such token", printable(end));
    return id;
  }
  if (is_folder(model) && !is_there(model / "config.json"))
    throw ConfigError("{} has no config.json that says with which token texts end; give --end TOKEN, or --end none", model);
  const auto config = llm::read_config(model);
  if (config.eos_token_ids.empty()) return {};
  return static_cast<int32_t>(config.eos_token_ids.front());
}

void add_sampling_flags(CLI::App& command, SamplingFlags& flags, int64_t most) {
  flags.most = most;
  const auto otherwise = "as generation_config.json says, or ";
  command.add_option("--max-new-tokens", flags.most, "Greatest number of tokens that are written")
      ->default_str(std::to_string(most))
      ->check(from_to(1, 100'000'000));
  command.add_option("--temperature", flags.temperature, "0: always the likeliest token; 1: by the model's own probabilities")
      ->default_str(otherwise + std::string("0"))
      ->check(from_to(0.0, 100.0));
  command.add_option("--top-k", flags.top_k, "Draws from so many of the likeliest tokens; 0: from all")
      ->default_str(otherwise + std::string("0"))
      ->check(from_to(0, 100'000'000));
  command.add_option("--top-p", flags.top_p, "Draws from the likeliest tokens that together have this probability")
      ->default_str(otherwise + std::string("1"))
      ->check(from_to(1e-6, 1.0));
  command.add_option("--min-p", flags.min_p, "Draws from tokens with at least this share of the likeliest token's probability")
      ->default_str(otherwise + std::string("0"))
      ->check(from_to(0.0, 1.0));
  command.add_option("--repetition-penalty", flags.repetition_penalty, "Above 1, tokens that the text already has become less likely")
      ->default_str(otherwise + std::string("1"))
      ->check(from_to(0.01, 100.0));
  command.add_option("--seed", flags.seed, "Seed of the draws")->capture_default_str()->check(from_to(int64_t{0}, std::numeric_limits<int64_t>::max()));
  command.add_option("--stop", flags.stops, "A text before which to stop; may be repeated")->type_name("TEXT")->allow_extra_args(false);
  command.add_flag("--ignore-eos", flags.ignores_ends, "Write on after tokens that end a text");
}

TextStream::TextStream(const data::Tokenizer& tokenizer, std::span<const int64_t> before, std::vector<std::string> stops, Print print)
    : tokenizer_(tokenizer), stops_(std::move(stops)), print_(std::move(print)) {
  const auto context = before.last(std::min(before.size(), kContext));
  tokens_.assign(context.begin(), context.end());
  read_ = tokens_.size();
}

bool TextStream::add(int64_t token) {
  tokens_.push_back(static_cast<int32_t>(token));
  const auto from = std::span<const int32_t>(tokens_).subspan(begin_);
  const auto before = tokenizer_.decode(from.first(read_ - begin_)), all = tokenizer_.decode(from);
  if (all.size() <= before.size() || all.ends_with(kUnfinished)) return !stopped_;
  text_ += all.substr(before.size());
  begin_ = read_;
  read_ = tokens_.size();
  return show(Hold::Back);
}

void TextStream::finish() {
  if (stopped_) return;
  const auto from = std::span<const int32_t>(tokens_).subspan(begin_);
  const auto before = tokenizer_.decode(from.first(read_ - begin_)), all = tokenizer_.decode(from);
  if (all.size() > before.size()) text_ += all.substr(before.size());
  show(Hold::Nothing);
}

bool TextStream::show(Hold hold) {
  auto end = text_.size();
  for (const auto& stop : stops_) {
    if (const auto place = text_.find(stop, shown_); place < end) {
      end = place;
      stopped_ = true;
    }
  }
  if (stopped_) text_.resize(end);
  for (const auto& stop : stops_) {
    if (stopped_ || hold == Hold::Nothing) break;
    for (auto size = std::min(stop.size() - 1, text_.size() - shown_); size > 0; size--) {
      if (!text_.ends_with(std::string_view(stop).substr(0, size))) continue;
      end = std::min(end, text_.size() - size);
      break;
    }
  }
  if (end > shown_) print_(std::string_view(text_).substr(shown_, end - shown_));
  shown_ = end;
  return !stopped_;
}

void Answer::count(const Answer& other) {
  read += other.read, added += other.added, steps += other.steps;
  to_read += other.to_read, to_write += other.to_write;
}

LanguageModel::LanguageModel(const ModelFlags& flags)
    : world(init()),
      config(config_of(flags.model)),
      tokenizer(llm::read_tokenizer(flags.model)),
      model(loaded(flags, config, world.traits().device)),
      generation_(generation_config(flags.model)) {}

models::GenerateOptions LanguageModel::options_of(const SamplingFlags& flags) const {
  const auto value = [&]<class T>(const std::optional<T>& flag, const char* key, T otherwise) {
    const auto known = generation_.find(key);
    return flag ? *flag : known != generation_.end() && known->is_number() ? known->template get<T>() : otherwise;
  };
  const bool draws = generation_.value("do_sample", Json()) == true;
  models::GenerateOptions options{.most = flags.most,
                                  .temperature = draws ? value(flags.temperature, "temperature", 1.0) : flags.temperature.value_or(0),
                                  .top_k = value(flags.top_k, "top_k", int64_t{0}),
                                  .top_p = value(flags.top_p, "top_p", 1.0),
                                  .min_p = value(flags.min_p, "min_p", 0.0),
                                  .repetition_penalty = value(flags.repetition_penalty, "repetition_penalty", 1.0),
                                  .vocabulary = tokenizer.size(),
                                  .seed = flags.seed};
  if (options.temperature == 0 && (flags.top_k || flags.top_p || flags.min_p))
    throw ConfigError("--top-k, --top-p and --min-p are for draws, and at temperature 0 the likeliest token is taken; give --temperature 1, too");
  if (flags.ignores_ends) return options;
  options.ends = config.eos_token_ids;
  const auto more = generation_.value("eos_token_id", Json());
  for (const auto& end : more.is_array() ? more : Json::array({more})) {
    if (end.is_number_integer()) options.ends.push_back(end.get<int64_t>());
  }
  return options;
}

Answer LanguageModel::answer(const std::vector<int64_t>& tokens, models::GenerateOptions options, const std::vector<std::string>& stops,
                             const Print& print, const std::function<bool()>& interrupted) {
  Answer answer{.tokens = {}, .text = {}, .read = std::ssize(tokens) - (options.cache == nullptr ? 0 : options.cache->length())};
  TextStream stream(tokenizer, tokens, stops, print);
  const auto begin = Clock::now();
  options.listen = [&](int64_t token) {
    world.step_done();  // for a device that traces: each token is a program of its own
    if (answer.added++ == 0) answer.to_read = seconds_since(begin);
    const bool is_end = std::ranges::find(options.ends, token) != options.ends.end();
    const bool goes_on = is_end || stream.add(token);
    if (!interrupted) return goes_on;
    const uint64_t own = interrupted() ? 1 : 0;
    return goes_on && (world.traits().can_differ() ? world.extremes(own, {.unit = "the answer"}).most : own) == 0;
  };
  const auto prompt = at::tensor(tokens, at::kLong).unsqueeze(0).to(world.traits().device);
  const auto all = models::generate(*model, prompt, options).flatten().cpu();
  stream.finish();
  answer.steps = std::max<int64_t>(answer.added - 1, 0);
  answer.to_write = seconds_since(begin) - answer.to_read;
  answer.tokens.assign(all.const_data_ptr<int64_t>(), all.const_data_ptr<int64_t>() + all.numel());
  answer.text = stream.text();
  return answer;
}

std::vector<int64_t> LanguageModel::encode(std::string_view text, data::Ends ends) const {
  const auto tokens = tokenizer.encode(text, ends);
  return {tokens.begin(), tokens.end()};
}

Print LanguageModel::printing() const {
  if (!world.is_first()) return [](std::string_view) {};
  return [is_terminal = ::isatty(STDOUT_FILENO) != 0](std::string_view text) {
    fmt::print("{}", is_terminal ? printable(text, "\n\t") : text);
    std::fflush(stdout);
  };
}

void LanguageModel::note(const std::string& line) const {
  if (world.is_first()) fmt::print(stderr, "{}\n", line);
}

std::string speed_of(const Answer& sum) {
  const auto rate = [](int64_t tokens, double seconds) { return seconds > 0 ? static_cast<double>(tokens) / seconds : 0.0; };
  return fmt::format("prompt: {}, {:.1f} a second; text: {}, {:.1f} a second", counted(sum.read, "token"), rate(sum.read, sum.to_read),
                     counted(sum.added, "token"), rate(sum.steps, sum.to_write));
}

}  // namespace tessera::cli
