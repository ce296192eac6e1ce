#include "tessera/nn/lora.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/nn/lora_layer.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/weight_operator.h"

namespace tessera::lora {
namespace {

using torch::nn::Module;

constexpr std::string_view kBiases[] = {"none", "all", "lora_only"};

/// A layer that can have an adapter.
struct Target {
  std::string name;
  std::shared_ptr<Module> module;
  Kind kind;
  at::Tensor weight, bias;
  std::vector<int64_t> down, up;  // the sizes of A and B, with 1 in place of the rank, which is the first size of A and the second of B
  int64_t groups = 1;
  bool is_embedding_too = false;  // whether an embedding shares the weight

  /// The largest rank that the weight can have.
  int64_t width() const { return std::min(c10::multiply_integers(down), up[0]); }
};

std::optional<Target> target_of(const std::string& name, const std::shared_ptr<Module>& module) {
  if (const auto* linear = module->as<torch::nn::LinearImpl>())
    return Target{name, module, Kind::Linear, linear->weight, linear->bias, {1, linear->weight.size(1)}, {linear->weight.size(0), 1}};
  if (const auto* embedding = module->as<torch::nn::EmbeddingImpl>())
    return Target{name, module, Kind::Embedding, embedding->weight, {}, {1, embedding->weight.size(0)}, {embedding->weight.size(1), 1}};
  if (const auto* conv = module->as<torch::nn::Conv2dImpl>()) {
    const auto& weight = conv->weight;
    const auto groups = conv->options.groups();
    return Target{name,
                  module,
                  Kind::Conv,
                  weight,
                  conv->bias,
                  {1, weight.size(1) * groups, weight.size(2), weight.size(3)},
                  {weight.size(0), 1, 1, 1},
                  groups};
  }
  return std::nullopt;
}

std::vector<Target> layers_in(Module& model) {
  std::vector<Target> all;
  const auto add = [&](const std::string& name, const std::shared_ptr<Module>& module) {
    if (auto target = target_of(name, module)) all.push_back(*std::move(target));
  };
  for (const auto& item : model.named_modules({}, /*include_self=*/false)) add(item.key(), item.value());
  for (const auto& embedding : all) {
    if (embedding.kind != Kind::Embedding) continue;
    for (auto& layer : all) layer.is_embedding_too |= layer.kind != Kind::Embedding && layer.weight.is_same(embedding.weight);
  }
  return all;
}

bool fits(const std::string& name, const std::string& pattern) {
  return nn::matches(name, "(.*\\.)?(" + pattern + ")");
}

/// The value of the first pattern that matches, as in peft.
template <class Value>
Value by_pattern(const std::string& name, const ByPattern<Value>& patterns, Value otherwise) {
  for (const auto& [pattern, value] : patterns) {
    if (fits(name, pattern)) return value;
  }
  return otherwise;
}

std::vector<std::string> patterns_of(const Options& options) {
  std::vector<std::string> patterns;
  for (const auto& [pattern, r] : options.rank_pattern) patterns.push_back(pattern);
  for (const auto& [pattern, alpha] : options.alpha_pattern) patterns.push_back(pattern);
  return patterns;
}

/// Whether the module, or a module that contains it, has one of these names.
bool is_within(const std::string& name, const std::vector<std::string>& modules) {
  for (auto end = name.find('.'); end != std::string::npos; end = name.find('.', end + 1)) {
    if (nn::is_in(name.substr(0, end), modules)) return true;
  }
  return nn::is_in(name, modules);
}

std::shared_ptr<LayerAdapters> adapted_of(const Module& layer) {
  for (const auto& child : layer.named_children()) {
    if (const auto parameters = std::dynamic_pointer_cast<Parameters>(child.value())) return parameters->owner.lock();
  }
  return nullptr;
}

std::vector<Target> chosen(const std::vector<Target>& layers, const Options& options) {
  const auto is_chosen = [&](const Target& layer) {
    const bool trains_as_a_whole = is_within(layer.name, options.modules_to_save);
    return !trains_as_a_whole && options.layers.contains(layer.name, layer.kind == Kind::Linear);
  };
  std::vector<Target> result;
  std::vector<std::string> names;
  for (const auto& layer : layers) {
    names.push_back(layer.name);
    if (is_chosen(layer)) result.push_back(layer);
  }
  nn::expect_choice(options.layers, names, result.size(), "lora");
  for (const auto& layer : result) {
    // An embedding and the head of a model may share a weight, because an adapter of one of them does nothing in the other.
    const auto same = std::ranges::find_if(layers, [&](const Target& other) {
      const bool is_changed = options.init_lora_weights == Init::Pissa;  // Pissa changes the weight itself
      return other.name != layer.name && other.weight.is_same(layer.weight) && (other.kind == layer.kind || is_chosen(other) || is_changed);
    });
    if (same != layers.end())
      throw UsageError("lora: '{}' and '{}' share a weight, so one of them can't have an adapter; leave it out of target_modules",
                       layer.name, same->name);
    if (has_stand_in(layer.weight) && held_form(layer.weight) == nullptr && !adapted_of(*layer.module))
      throw UsageError("lora: the operator of '{}', or of a layer with the same weight, is replaced already; leave this layer out",
                       layer.name);
    if (shard_info(held_values(layer.weight)))
      throw UsageError("lora: '{}' is sharded already; apply adapters before fully_shard, which shards them, too", layer.name);
  }
  return result;
}

std::vector<std::pair<Target, std::shared_ptr<LayerAdapters>>> adapted_in(const Module& model) {
  std::vector<std::pair<Target, std::shared_ptr<LayerAdapters>>> all;
  for (auto& layer : layers_in(const_cast<Module&>(model))) {
    if (auto adapted = adapted_of(*layer.module)) all.emplace_back(std::move(layer), std::move(adapted));
  }
  return all;
}

void expect_sense(const Target& layer, const Options& options, int64_t r) {
  const auto refuse = [&](const std::string& why) { throw UsageError("lora: '{}': {}", layer.name, why); };
  if (r < 1 || r > kMostRank) refuse(fmt::format("a rank of {} makes no sense; give at least 1, and at most {}", r, kMostRank));
  if (options.lora_dropout < 0 || options.lora_dropout >= 1)
    refuse(fmt::format("a dropout of {} makes no sense; give 0 to less than 1", options.lora_dropout));
  if (r % layer.groups != 0) refuse(fmt::format("a rank of {} can't be divided among {} groups", r, layer.groups));
  const auto width = layer.width();
  const bool is_pissa = options.init_lora_weights == Init::Pissa;
  if (is_pissa && layer.kind != Kind::Linear) refuse("PiSSA is for linear layers");
  if (is_pissa && (held_values(layer.weight).is_meta() || held_form(layer.weight) != nullptr))
    refuse(
        "PiSSA computes the adapter from the weight, which has no values yet, or is quantised; load weights first, into a model that is "
        "neither sharded nor quantised");
  if (is_pissa && r > width) refuse(fmt::format("PiSSA of rank {} is wider than the layer; give at most {}", r, width));
  if (layer.kind == Kind::Conv && layer.groups > 1 && options.use_dora) refuse("DoRA is not defined for convolutions with groups");
}

/// A generator seeded by the default generator's seed and the names, so that all ranks draw the same, whatever they have drawn before.
at::Generator generator_of(const std::string& layer, const std::string& adapter) {
  const auto seed = at::detail::getDefaultCPUGenerator().current_seed();
  return at::detail::createCPUGenerator(seed ^ std::hash<std::string>()(layer + "\n" + adapter));
}

std::shared_ptr<Parameters> register_in(Module& layer, const std::string& name, std::shared_ptr<Parameters> parameters) {
  parameters->train(layer.is_training());  // new modules are in training mode
  return layer.register_module(name, std::move(parameters));
}

void add_adapter(const Target& layer, const Options& options, int64_t r, const std::string& adapter) {
  auto adapted = adapted_of(*layer.module);
  const bool nested = layer.kind != Kind::Embedding;
  if (!adapted) {
    adapted = std::make_shared<LayerAdapters>(layer.kind, layer.name, layer.is_embedding_too);
    const auto parameters = [&](const std::string& name, bool is_nested) {
      return register_in(*layer.module, name, std::make_shared<Parameters>(is_nested, adapted));
    };
    adapted->a = parameters(nested ? "lora_A" : "lora_embedding_A", nested);
    adapted->b = parameters(nested ? "lora_B" : "lora_embedding_B", nested);
    replace_weight_operator(layer.weight,
                            [adapted](std::string_view op, std::span<const c10::IValue> arguments) { return adapted->run(op, arguments); });
  }
  if (options.use_dora && !adapted->magnitudes)
    adapted->magnitudes = register_in(*layer.module, "lora_magnitude_vector", std::make_shared<Parameters>(/*nested=*/true, adapted));
  adapted->adapters[adapter] = {options, scaling_of(options, layer.name)};

  const auto dtype = at::promoteTypes(layer.weight.scalar_type(), at::kFloat);
  const auto device = layer.weight.is_meta() ? c10::Device(at::kCPU) : layer.weight.device();
  const auto made = [&](std::vector<int64_t> sizes) { return at::zeros(sizes, at::TensorOptions().dtype(dtype).device(device)); };
  auto down_sizes = layer.down, up_sizes = layer.up;
  down_sizes[0] = r, up_sizes[1] = r / layer.groups;
  auto down = made(down_sizes), up = made(up_sizes);
  const auto generator = generator_of(layer.name, adapter);
  if (layer.kind == Kind::Embedding) {
    up.normal_(0, 1, generator);
  } else if (options.init_lora_weights == Init::Gaussian) {
    down.normal_(0, 1 / static_cast<double>(r), generator);
  } else {
    const auto bound = 1 / std::sqrt(static_cast<double>(down[0].numel()));  // the bound of kaiming_uniform_ with a = sqrt(5)
    down.uniform_(-bound, bound, generator);
  }
  if (options.init_lora_weights == Init::Pissa) {
    const auto scaling = adapted->adapters.at(adapter).scaling;
    const auto [u, s, v] = at::linalg_svd(layer.weight.detach().to(down.scalar_type()), /*full_matrices=*/false);
    const auto roots = (s.narrow(0, 0, r) / scaling).sqrt();
    up.copy_(u.narrow(1, 0, r) * roots);
    down.copy_(roots.unsqueeze(1) * v.narrow(0, 0, r));
    at::Tensor(layer.weight).sub_(delta(layer.weight, {.a = down, .b = up, .scaling = scaling}));
  }
  adapted->a->add(adapter, down);
  adapted->b->add(adapter, up);
  if (!options.use_dora) return;
  const auto rows = layer.weight.size(layer.kind == Kind::Embedding ? 1 : 0);
  adapted->magnitudes->add(adapter, made(layer.kind == Kind::Conv ? std::vector<int64_t>{1, rows, 1, 1} : std::vector<int64_t>{rows}));
  const auto values = held_values(layer.weight);
  if (values.is_meta()) {
    adapted->magnitudes->tensors.at(adapter).fill_(
        std::numeric_limits<float>::quiet_NaN());  // NaN until reset_magnitudes(), so that training without it is noticed
  } else {
    adapted->reset_magnitudes(adapter, layer.weight);
  }
}

/// Sets requires_grad. For a sharded parameter, reading requires_grad makes the shard and the module's member agree, so this reads it
/// before and after setting it.
void set_training(at::Tensor tensor, bool trains) {
  if (tensor.requires_grad() == trains) return;
  tensor.set_requires_grad(trains);
  (void)tensor.requires_grad();
}

/// Makes the active adapters trainable, and the modules and biases that their options name, and freezes all other parameters.
void choose_training(Module& model) {
  const auto layers = adapted_in(model);
  std::vector<Options> acting;
  for (const auto& [layer, adapted] : layers) {
    for (const auto& name : adapted->active) acting.push_back(adapted->adapters.at(name).options);
  }
  const auto is_saved = [&](const std::string& name) {
    return std::ranges::any_of(acting, [&](const Options& options) { return is_within(name, options.modules_to_save); });
  };
  const bool all_biases = std::ranges::any_of(acting, [](const Options& options) { return options.bias == Bias::All; });
  const auto choose = [&](Module& module, bool whole) {
    for (auto& item : module.named_parameters(/*recurse=*/false)) set_training(item.value(), whole || (all_biases && item.key() == "bias"));
  };
  choose(model, /*whole=*/false);
  for (const auto& item : model.named_modules({}, /*include_self=*/false)) choose(*item.value(), is_saved(item.key()));
  for (const auto& [layer, adapted] : layers) {
    for (const auto& parameters : {adapted->a, adapted->b, adapted->magnitudes}) {
      if (!parameters) continue;
      for (auto& [name, tensor] : parameters->tensors) set_training(tensor, std::ranges::count(adapted->active, name) > 0);
    }
    const auto trains_bias = [&](const std::string& name) { return adapted->adapters.at(name).options.bias == Bias::LoraOnly; };
    if (layer.bias.defined() && std::ranges::any_of(adapted->active, trains_bias)) set_training(layer.bias, true);
  }
}

std::vector<std::pair<Target, std::shared_ptr<LayerAdapters>>> with_adapter(const Module& model, const std::string& adapter) {
  auto all = adapted_in(model);
  std::erase_if(all, [&](const auto& each) { return !each.second->adapters.contains(adapter); });
  if (all.empty()) throw UsageError("lora: the model has no adapter '{}'; it has: {}", adapter, joined(adapters(model)));
  return all;
}

void add_once(std::vector<std::string>& names, const std::string& name) {
  if (std::ranges::find(names, name) == names.end()) names.push_back(name);
}

void activate(Module& model, const std::vector<std::string>& names) {
  for (const auto& [layer, adapted] : adapted_in(model)) {
    adapted->active.clear();
    for (const auto& name : names) {
      if (adapted->adapters.contains(name)) adapted->active.push_back(name);
    }
  }
}

/// Throws UsageError if one of the modules does not exist, or is quantised and so can't train.
void expect_whole_modules(const Module& model, const std::vector<std::string>& modules) {
  std::vector<std::string> names;
  for (const auto& item : model.named_modules({}, /*include_self=*/false)) names.push_back(item.key());
  for (const auto& wanted : modules) {
    if (std::ranges::none_of(names, [&](const auto& name) { return nn::is_named(name, wanted); }))
      throw UsageError("lora: modules_to_save: no module is named '{}'; modules are named: {}", wanted, nn::last_parts(names));
  }
  for (const auto& item : model.named_parameters()) {
    const auto* const form = is_within(item.key(), modules) ? held_form(item.value()) : nullptr;
    if (form != nullptr)
      throw UsageError("lora: modules_to_save: '{}' is quantised to {} and frozen; leave it out of QuantizeOptions::layers", item.key(),
                       form->name);
  }
}

/// Throws UsageError if another adapter trains the same modules or biases as a whole: these have one value for all adapters.
void expect_own_wholes(const Module& model, const Options& options, const std::string& adapter) {
  std::map<std::string, Options> others;
  for (const auto& [layer, adapted] : adapted_in(model)) {
    for (const auto& [name, other] : adapted->adapters) others.try_emplace(name, other.options);
  }
  others.erase(adapter);
  for (const auto& [name, other] : others) {
    for (const auto& item : model.named_modules({}, /*include_self=*/false)) {
      if (!is_within(item.key(), options.modules_to_save) || !is_within(item.key(), other.modules_to_save)) continue;
      throw UsageError(
          "lora: modules_to_save: '{}' trains with adapter '{}' already, and has one value for all adapters; leave it "
          "out of '{}', or give that a model of its own",
          item.key(), name, adapter);
    }
    if (options.bias != Bias::None && other.bias != Bias::None)
      throw UsageError(
          "lora: biases train with adapter '{}' already, and have one value for all adapters; give '{}' Bias::None, "
          "or a model of its own",
          name, adapter);
  }
}

}  // namespace

std::string_view name_of(Bias bias) {
  return kBiases[static_cast<size_t>(bias)];
}

std::optional<Bias> bias_named(std::string_view name) {
  const auto* const known = std::ranges::find(kBiases, name);
  return known == std::end(kBiases) ? std::nullopt : std::optional(static_cast<Bias>(known - kBiases));
}

int64_t rank_of(const Options& options, const std::string& layer) {
  return by_pattern(layer, options.rank_pattern, options.r);
}

double scaling_of(const Options& options, const std::string& layer) {
  const auto alpha = by_pattern(layer, options.alpha_pattern, options.lora_alpha), rank = static_cast<double>(rank_of(options, layer));
  return alpha / (options.use_rslora ? std::sqrt(rank) : rank);
}

void apply(ModuleRef model, const Options& options, const std::string& adapter) {
  if (!nn::matches(adapter, "[A-Za-z0-9_-]+"))
    throw UsageError("lora: '{}' can't be the name of an adapter; use letters, digits, _ and -", adapter);
  expect_unmerged(model);
  expect_whole_modules(*model, options.modules_to_save);
  expect_own_wholes(*model, options, adapter);
  const auto targets = chosen(layers_in(*model), options);
  for (const auto& layer : targets) {
    expect_sense(layer, options, rank_of(options, layer.name));
    const auto adapted = adapted_of(*layer.module);
    if (adapted && adapted->adapters.contains(adapter)) throw UsageError("lora: '{}' has an adapter '{}' already", layer.name, adapter);
  }
  for (const auto& pattern : patterns_of(options)) {
    if (std::ranges::none_of(targets, [&](const Target& layer) { return fits(layer.name, pattern); }))
      log(LogLevel::Warning, "lora: '{}', of rank_pattern or alpha_pattern, matches no layer with an adapter", pattern);
  }
  std::vector<std::string> narrow;
  for (const auto& layer : targets) {
    if (rank_of(options, layer.name) > layer.width()) narrow.push_back(layer.name);
  }
  if (!narrow.empty()) log(LogLevel::Warning, "lora: the rank is wider than these layers, so a smaller one would do: {}", some_of(narrow));
  const bool is_first = adapted_in(*model).empty();
  {
    const c10::AutoGradMode no_grad(false);
    for (const auto& layer : targets) add_adapter(layer, options, rank_of(options, layer.name), adapter);
  }
  if (is_first) activate(*model, {adapter});
  choose_training(*model);
}

std::string description(ConstModuleRef model) {
  std::vector<std::string> all;
  for (const auto& name : adapters(model)) {
    const auto& options = options_of(model, name);
    auto text = fmt::format("{} (rank {}, alpha {}", name, options.r, options.lora_alpha);
    for (const auto& [pattern, r] : options.rank_pattern) text += fmt::format(", rank {} for {}", r, pattern);
    for (const auto& [pattern, alpha] : options.alpha_pattern) text += fmt::format(", alpha {} for {}", alpha, pattern);
    if (options.use_rslora) text += ", rsLoRA";
    if (options.use_dora) text += ", DoRA";
    if (options.init_lora_weights == Init::Pissa) text += ", PiSSA";
    all.push_back(text + ")");
  }
  return fmt::format("{}", fmt::join(all, ", "));
}

void expect_unmerged(ConstModuleRef model) {
  for (const auto& [layer, adapted] : adapted_in(*model)) {
    if (adapted->has_merged()) throw UsageError("lora: adapters are merged into '{}'; unmerge them before", layer.name);
  }
}

void reset_magnitudes(ModuleRef model, const std::string& adapter) {
  expect_unmerged(model);
  for (const auto& [layer, adapted] : with_adapter(*model, adapter)) {
    if (!adapted->adapters.at(adapter).options.use_dora) continue;
    const auto all = full_params(*layer.module, Access::Write);
    adapted->reset_magnitudes(adapter, layer.weight);
  }
}

std::vector<std::string> adapters(ConstModuleRef model) {
  std::vector<std::string> names;
  for (const auto& [layer, adapted] : adapted_in(*model)) {
    for (const auto& [name, adapter] : adapted->adapters) add_once(names, name);
  }
  return names;
}

std::vector<std::string> active_adapters(ConstModuleRef model) {
  std::vector<std::string> names;
  for (const auto& [layer, adapted] : adapted_in(*model)) {
    for (const auto& name : adapted->active) add_once(names, name);
  }
  return names;
}

void set_adapters(ModuleRef model, const std::vector<std::string>& names) {
  for (const auto& name : names) {
    with_adapter(*model, name);
    if (std::ranges::count(names, name) > 1) throw UsageError("lora: adapter '{}' is named twice, and would count twice", name);
  }
  expect_unmerged(model);
  activate(*model, names);
  choose_training(*model);
}

Disabled::Disabled(ModuleRef model) : model_(*model) {
  expect_unmerged(model);
  for (const auto& [layer, adapted] : adapted_in(model_)) before_.emplace_back(adapted, adapted->active);
  activate(model_, {});
}

Disabled::~Disabled() {
  if (!active_adapters(model_).empty()) return;  // the program has chosen others meanwhile
  for (auto& [adapted, active] : before_) adapted->active = std::move(active);
}

void merge(ModuleRef model) {
  const auto layers = adapted_in(*model);
  const auto all_layers = layers_in(*model);
  for (const auto& [layer, adapted] : layers) {
    if (adapted->active.empty()) continue;
    const auto same = std::ranges::find_if(
        all_layers, [&](const Target& other) { return other.name != layer.name && other.weight.is_same(layer.weight); });
    if (same != all_layers.end())
      throw UsageError("lora: '{}' can't be merged: '{}' has the same weight, and must not get the adapter", layer.name, same->name);
    if (const auto* form = held_form(layer.weight))
      throw UsageError("lora: the weight of '{}' is quantised to {}, so no adapter can be merged into it; merge into the original model",
                       layer.name, form->name);
    if (layer.groups > 1)
      throw UsageError("lora: '{}' is a convolution with groups, whose adapters can't become a part of its weight", layer.name);
    const auto is_dora = [&](const std::string& name) { return adapted->adapters.at(name).options.use_dora; };
    if (adapted->active.size() > 1 && std::ranges::any_of(adapted->active, is_dora))
      throw UsageError("lora: because of DoRA, {} give other results if merged into '{}' one after the other; make only one active",
                       joined(adapted->active, " and "), layer.name);
  }
  for (const auto& [layer, adapted] : layers) {
    if (adapted->active.empty()) continue;
    const auto all = full_params(*layer.module, Access::Write);
    const c10::AutoGradMode no_grad(false);
    adapted->merge_into(layer.weight);
  }
}

void unmerge(ModuleRef model) {
  for (const auto& [layer, adapted] : adapted_in(*model)) {
    if (!adapted->has_merged()) continue;
    const auto all = full_params(*layer.module, Access::Write);
    const c10::AutoGradMode no_grad(false);
    adapted->take_out_of(layer.weight);
  }
  choose_training(*model);
}

const Options& options_of(ConstModuleRef model, const std::string& adapter) {
  return with_adapter(*model, adapter).front().second->adapters.at(adapter).options;
}

std::vector<Layer> layers_of(ConstModuleRef model, const std::string& adapter) {
  std::vector<Layer> result;
  for (const auto& [layer, adapted] : with_adapter(*model, adapter)) {
    const auto& own = adapted->adapters.at(adapter);
    auto& made = result.emplace_back(Layer{.name = layer.name, .names = {}, .has_bias = layer.bias.defined()});
    const bool nested = adapted->a->nested;
    const std::string kinds = nested ? "lora_" : "lora_embedding_", suffix = nested ? ".weight" : "";
    for (const auto& kind : {kinds + "A", kinds + "B"})
      made.names[kind + suffix] = fmt::format("{}.{}.{}{}", layer.name, kind, adapter, suffix);
    if (own.options.use_dora) made.names["lora_magnitude_vector"] = fmt::format("{}.lora_magnitude_vector.{}.weight", layer.name, adapter);
  }
  return result;
}

}  // namespace tessera::lora
