#include "tessera/train/trainer.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/optim/schedulers/lr_scheduler.h>

#include <algorithm>
#include <cstdio>
#include <set>
#include <tuple>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/move_module.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/comm/init.h"
#include "tessera/comm/simulation.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/rebind.h"
#include "tessera/shard/wrap.h"
#include "tessera/train/adapter_settings.h"
#include "tessera/train/sharding_settings.h"

namespace tessera {
namespace {

config::Settings settings_of(const TrainerOptions& options) {
  config::Settings settings;
  for (const auto& [key, value] : options.defaults) settings.set(key, value, config::Origin::Default, "TrainerOptions::defaults");
  const auto file = options.config_file.empty() ? env("TESSERA_CONFIG_FILE").value_or("") : options.config_file.string();
  if (!file.empty()) settings.read_file(file);
  settings.read_environment();
  for (const auto& [key, value] : options.settings) settings.set(key, value, config::Origin::Code, "TrainerOptions::settings");
  settings.expect_consistent();
  return settings;
}

/// Throws DisagreementError if settings that launch passes on differ between ranks: launchers of several hosts may have got different flags.
void expect_same_settings(const config::Settings& settings, const Communicator& world) {
  if (!world.traits().can_differ()) return;
  std::string lines;
  for (const auto& key : config::keys()) {
    if (!key.variable.empty() && has_effect(key)) lines += fmt::format("{}\t{}\n", key.name, settings.text(key.name));
  }
  const auto different = difference_on_ranks(world, lines, {.unit = "settings"});
  if (!different.empty()) throw DisagreementError("ranks have different settings; give all of them the same. {}", different);
}

/// Returns the world that the program has given, or else the one of init(). Throws ConfigError if the given world is over another transport
/// than the settings ask for.
Communicator world_of(const TrainerOptions& options, const config::Settings& settings) {
  const auto& transport = settings.setting("tessera_transport");
  const bool is_asked_for = transport.origin != config::Origin::Default && transport.origin != config::Origin::Environment;
  if (!options.world) {
    InitOptions init_options{.transport = is_asked_for ? transport.value : ""};  // init reads the environment itself
    if (settings.is_true("use_cpu")) init_options.device = at::kCPU;
    return train::with_settings(settings, config::Call::Init, [&] { return init(init_options); });
  }
  const auto& given = options.world->traits().name;
  if (!is_asked_for || transport.value == "auto" || transport.value == given) return *options.world;
  throw ConfigError("{}: tessera_transport is {}, but the program has given the Trainer a world over {}; leave one of them out",
                    transport.where, transport.value, given);
}

/// Returns the names to which log() writes, from the program and the settings. Throws ConfigError for a path whose name tells no format.
std::vector<std::string> reports_of(const TrainerOptions& options, const config::Settings& settings) {
  auto paths = options.log_with;
  for (const auto& path : paths) train::report_format(path);
  const auto add = [&](const std::string& path) {
    if (std::ranges::find(paths, path) == paths.end()) paths.push_back(path);
  };
  const auto& setting = settings.setting("tessera_log_with");
  for (const auto& path : train::comma_separated(setting.value)) {
    if (setting.value == "none") break;
    try {
      train::report_format(path);
    } catch (const ConfigError& error) {
      throw ConfigError("{}: tessera_log_with: {}", setting.where, error.what());
    }
    add(path);
  }
  return paths;
}

bool have_gradients(const std::vector<at::Tensor>& parameters) {
  return std::ranges::any_of(parameters, [](const at::Tensor& parameter) { return parameter.grad().defined(); });
}

bool are_of(const torch::nn::Module& model, const std::vector<at::Tensor>& held) {
  std::set<const c10::TensorImpl*> own;
  for (const auto& parameter : parameters(model)) own.insert(parameter.unsafeGetTensorImpl());
  return std::ranges::all_of(held, [&](const at::Tensor& parameter) { return own.contains(parameter.unsafeGetTensorImpl()); });
}

/// Throws UsageError if the optimizer was made before the model was sharded: a backward pass would give its parameters no gradients.
void expect_parameters_of(const torch::nn::Module& model, const std::vector<at::Tensor>& held) {
  if (are_of(model, held)) return;
  throw UsageError(
      "Trainer::prepare was given an optimizer with parameters that the model before it does not have; prepare the model first, and then "
      "make the optimizer with tessera::parameters(*model)");
}

}  // namespace

Trainer::Trainer(TrainerOptions options)
    : options_(std::move(options)),
      settings_(settings_of(options_)),
      world_(world_of(options_, settings_)),
      scaler_({.enabled = settings_.text("mixed_precision") == "fp16"}),
      reports_(reports_of(options_, settings_)) {
  expect_same_settings(settings_, world_);
  if (!is_main_process()) return;
  if (Simulation::current() == nullptr) train::expect_free_ports(reports_);  // rather than after the first steps
  for (const auto& remark : settings_.remarks()) tessera::log(LogLevel::Warning, remark);
  const auto& type = settings_.text("distributed_type");
  if ((type == "MULTI_GPU" || type == "XLA") && world_.traits().device.is_cpu()) {
    tessera::log(LogLevel::Warning,
                 fmt::format("{}: distributed_type {}, but ranks train on the CPU{}", settings_.setting("distributed_type").where, type,
                             type == "XLA" ? "; tessera launch starts the program with its XLA devices" : ""));
  }
}

Trainer::~Trainer() = default;

void Trainer::print(std::string_view line) const {
  if (!is_main_process()) return;
  fmt::print("{}\n", line);
  std::fflush(stdout);
}

bool Trainer::needs_values() const {
  return is_main_process() || settings_.text("distributed_type") != "FSDP" || !settings_.is_true("fsdp_cpu_ram_efficient_loading");
}

void Trainer::free_memory() {
  models_.clear();
  optimizers_.clear();
  loaders_.clear();
  registered_.clear();
  scaler_ = optim::GradScaler({.enabled = scaler_.options().enabled});
  batches_ = 0;
  syncs_ = true;
}

void Trainer::prepare_one(const std::shared_ptr<torch::nn::Module>& model) {
  if (!model) throw UsageError("Trainer::prepare was given an empty pointer in place of a model");
  train::with_settings(settings_, config::Call::Adapt, [&] { train::adapt(settings_, model); });
  auto sharding = train::sharding_of(settings_, *model, world_);
  if (options_.adjust_sharding) options_.adjust_sharding(sharding.options);
  if (sharding.options.offload.parameters != OffloadTo::Host) move_module(*model, world_.traits().device);
  if (sharding.activation) {
    if (sharding.policy) {
      activation::checkpoint_modules(*model, *sharding.policy, *sharding.activation);
    } else {
      activation::checkpoint_module(model, *sharding.activation);
    }
  }
  train::with_settings(settings_, config::Call::Shard, [&] {
    if (sharding.policy) {
      fully_shard(*model, sharding.options, *sharding.policy);
    } else {
      fully_shard(model, sharding.options);
    }
  });
  if (sharding.options.start == Start::FromRank0) {
    sync_buffers(*model, world_, BufferSync::Rank0);
    for (const auto& parameter : sharding.options.ignored)
      parameter.detach().copy_(synced("fsdp_ignored_modules", parameter, world_, BufferSync::Rank0));
  }
  models_.push_back({.module = model});
}

void Trainer::prepare_one(optim::Average& average) {
  if (models_.empty()) throw UsageError("Trainer::prepare was given an average before a model; an average comes after its model");
  if (models_.back().average != nullptr) throw UsageError("Trainer::prepare was given two averages of one model, and checkpoints have one");
  models_.back().average = &average;
}

data::Loader& Trainer::placed(data::Loader& loader) const {
  if (!world_.traits().device.is_cpu()) loader.place([world = world_](const at::Tensor& rows) { return world.to_local_ranks(rows); });
  return loader;
}

void Trainer::prepare_one(data::Loader& loader) {
  loaders_.push_back(&placed(loader));
}

int64_t Trainer::steps_of_epoch(data::Loader& loader) const {
  const auto position = loader.position();
  const auto count = position.first == 0 ? loader.batches() : loader.batches_of_epoch(position.epoch);
  if (!count) throw UsageError("the length of this loader's epochs is not known before they end; count steps instead");
  const auto batches = settings_.integer("gradient_accumulation_steps");
  return (*count + batches - 1) / batches;
}

data::Sampler Trainer::make_sampler(data::SamplerOptions options) const {
  options.local_ranks = world_.local_ranks();
  options.ranks = world_.size();
  return data::Sampler(options);
}

data::Stream Trainer::make_stream(data::StreamOptions options) const {
  options.local_ranks = world_.local_ranks();
  options.ranks = world_.size();
  return data::Stream(std::move(options));
}

std::vector<data::Loader*> Trainer::current_loaders() const {
  struct Candidate {
    uint64_t open = 0;     // the number of the innermost open loop over the loader; 0 if none is open
    bool is_left = false;  // whether the loop in which the batch was taken has ended
    uint64_t taken = 0;
    data::Loader* loader = nullptr;
  };
  std::vector<Candidate> candidates;
  for (auto* const loader : loaders_) {
    const auto& taken = loader->taken();
    const auto open = loader->open_loop();
    if (taken.number > 0) candidates.push_back({open, open == 0 && taken.loop > 0, taken.number, loader});
  }
  const auto rank = [](const Candidate& each) { return std::tuple(each.open, !each.is_left, each.taken); };
  const auto present = std::ranges::max_element(candidates, {}, rank);
  if (present == candidates.end()) return {};
  std::vector loaders = {present->loader};
  for (const auto& each : candidates) {
    const auto since = present->open > 0 ? present->taken : used_;
    if (each.loader != present->loader && each.is_left == present->is_left && each.taken > since) loaders.push_back(each.loader);
  }
  return loaders;
}

double Trainer::present_weight() const {
  const auto loaders = current_loaders();
  if (loaders.empty()) return 1;
  const auto weight_of = [](const data::Loader* loader) { return loader->taken().weight; };
  const double weight = weight_of(loaders.front());
  const auto other = std::ranges::find_if(loaders, [&](const auto* loader) { return weight_of(loader) != weight; });
  if (other == loaders.end()) return weight;
  throw UsageError(
      "Trainer::backward: batches of two prepared loaders were taken for this loss, with weights {} and {}; say to which batch the loss belongs: "
      "trainer.backward(loss, batch), or trainer.backward(loss, {{}}) for a loss that is weighted already",
      weight, weight_of(*other));
}

void Trainer::expect_new(optim::AnyOptimizer optimizer) const {
  if (models_.empty()) throw UsageError("Trainer::prepare was given an optimizer before a model; an optimizer comes after its model");
  if (std::ranges::find(optimizers_, optimizer, &Prepared::optimizer) != optimizers_.end())
    throw UsageError("Trainer::prepare was given the same optimizer twice");
}

void Trainer::add(Prepared prepared) {
  models_.back().optimizers.push_back(optimizers_.size());
  optimizers_.push_back(std::move(prepared));
}

void Trainer::prepare_one(optim::Optimizer& optimizer) {
  expect_new(&optimizer);
  expect_parameters_of(*models_.back().module, optimizer.parameters());
  add({.optimizer = &optimizer});
}

void Trainer::prepare_one(torch::optim::Optimizer& optimizer) {
  expect_new(&optimizer);
  const auto& model = *models_.back().module;
  if (!are_of(model, optim::parameters_of(&optimizer))) rebind(optimizer, model);
  Prepared prepared{.optimizer = &optimizer};
  for (const auto& group : optimizer.param_groups()) prepared.first_rates.push_back(group.options().get_lr());
  add(std::move(prepared));
}

Trainer::Prepared& Trainer::without_rate() {
  if (optimizers_.empty())
    throw UsageError("Trainer::prepare was given a learning rate before an optimizer; give it after its optimizer");
  auto& optimizer = optimizers_.back();
  if (optimizer.rate || optimizer.scheduler != nullptr) throw UsageError("Trainer::prepare was given two learning rates for one optimizer");
  return optimizer;
}

void Trainer::prepare_one(const optim::LearningRate& rate) {
  rate.at(0);  // throws for settings that make no sense
  without_rate().rate = rate;
}

void Trainer::prepare_one(torch::optim::LRScheduler& scheduler) {
  auto& optimizer = without_rate();
  if (!std::holds_alternative<torch::optim::Optimizer*>(optimizer.optimizer))
    throw UsageError("Trainer::prepare was given a scheduler of torch after an optimizer of Tessera; give such an optimizer an optim::LearningRate");
  optimizer.scheduler = &scheduler;
}

Trainer::Accumulation Trainer::accumulate() {
  if (syncs_) batches_ = 0;
  batches_++;
  const auto loaders = current_loaders();
  syncs_ = batches_ >= settings_.integer("gradient_accumulation_steps") || (!loaders.empty() && loaders.front()->at_end());
  std::vector<NoSync> held;
  for (const auto& model : models_) {
    if (!syncs_) held.push_back(no_sync(*model.module));
  }
  return {*this, std::move(held)};
}

void Trainer::backward(const at::Tensor& loss) {
  backward_weighted(loss, present_weight());
}

void Trainer::backward_weighted(const at::Tensor& loss, double weight) {
  const auto batches = settings_.integer("gradient_accumulation_steps");
  if (batches > 1 && !in_batch_) {
    throw UsageError(
        "gradient_accumulation_steps is {} ({}), but Trainer::backward was called outside of an accumulation; begin each batch with: const "
        "auto accumulation = trainer.accumulate();",
        batches, settings_.setting("gradient_accumulation_steps").where);
  }
  // The program may have dropped gradients by itself.
  update_scale();
  for (auto& each : optimizers_) {
    each.averaged = false;
    each.clipped = each.clipped && have_gradients(parameters_of(each));
  }
  used_ = data::Loader::newest();
  const auto share = batches == 1 ? loss : loss / batches;
  scaler_.scale(weight == 1 ? share : share * weight).backward();
}

void Trainer::expect_one_scale(const Prepared& optimizer) const {
  if (!scaler_.options().enabled || !optimizer.stepped) return;
  throw UsageError(
      "with mixed_precision fp16, an optimizer can step again only when no other one has gradients of an earlier loss; step the others, too, or "
      "drop their gradients by zero_grad()");
}

/// Averages the gradients of trained parameters in fsdp_ignored_modules over the ranks. Backward does not, because these parameters are in
/// no unit.
void Trainer::average(Prepared& optimizer) const {
  if (!optimizer.averaged) average_gradients(parameters_of(optimizer), world_);
  optimizer.averaged = true;
}

void Trainer::unscale(Prepared& optimizer) {
  expect_one_scale(optimizer);
  if (!scaler_.options().enabled || optimizer.unscaled) return;
  std::visit([&](auto* each) { scaler_.unscale_(*each); }, optimizer.optimizer);
  optimizer.unscaled = true;
}

/// Averages and unscales the gradients of all optimizers that have gradients, and returns the parameters of these optimizers.
std::vector<at::Tensor> Trainer::unscaled_parameters() {
  std::vector<at::Tensor> all;
  for (auto& optimizer : optimizers_) {
    average(optimizer);
    const auto held = parameters_of(optimizer);
    if (!have_gradients(held)) continue;
    unscale(optimizer);
    all.insert(all.end(), held.begin(), held.end());
  }
  return all;
}

/// Updates the scale of gradients once no optimizer has gradients left, because all gradients of one loss must have the same scale.
void Trainer::update_scale() {
  const auto has_stepped = [](const Prepared& each) { return each.stepped; };
  const auto has_gradients = [](const Prepared& each) { return have_gradients(parameters_of(each)); };
  if (!scaler_.options().enabled || std::ranges::none_of(optimizers_, has_stepped) || std::ranges::any_of(optimizers_, has_gradients))
    return;
  scaler_.update();
  for (auto& each : optimizers_) each.stepped = each.unscaled = false;
}

/// Returns the only optimizer if it is one of Tessera's; null otherwise. Tessera's optimizers know by which factor their next step
/// multiplies gradients.
optim::Optimizer* Trainer::only_optimizer() const {
  auto* const* own = optimizers_.size() == 1 ? std::get_if<optim::Optimizer*>(&optimizers_.front().optimizer) : nullptr;
  return own == nullptr ? nullptr : *own;
}

at::Tensor Trainer::grad_norm(double p) {
  if (!syncs_) return {};
  const auto all = unscaled_parameters();
  auto* const own = only_optimizer();
  return own != nullptr ? own->grad_norm(p) : tessera::grad_norm(all, {.p = p});
}

/// Warns if the settings have another limit: whoever has set it, such as by a flag of launch, expects its effect.
void Trainer::warn_of_other_limit(double max_norm) {
  if (!settings_.is_set("gradient_clipping") || settings_.number("gradient_clipping") == max_norm) return;
  if (std::exchange(warned_of_limit_, true) || !is_main_process()) return;
  tessera::log(LogLevel::Warning,
               fmt::format("gradient_clipping is {} ({}), but the program limits the norm of gradients to {} by clip_grad_norm, which "
                           "wins; the limit of the settings has an effect only if the program does not call clip_grad_norm",
                           settings_.text("gradient_clipping"), settings_.setting("gradient_clipping").where, max_norm));
}

at::Tensor Trainer::clip_grad_norm(double max_norm, double p) {
  if (!syncs_) return {};
  warn_of_other_limit(max_norm);
  const auto all = unscaled_parameters();
  for (auto& each : optimizers_) each.clipped |= have_gradients(parameters_of(each));
  auto* const own = only_optimizer();
  return own != nullptr ? own->clip_grad_norm(max_norm, p) : tessera::clip_grad_norm(all, max_norm, {.p = p});
}

void Trainer::clip_grad_value(double clip_value) {
  if (syncs_) tessera::clip_grad_value(unscaled_parameters(), clip_value);
}

bool Trainer::step() {
  if (optimizers_.empty()) throw UsageError("Trainer::step was called, but prepare() was given no optimizer");
  return step_some({});
}

bool Trainer::step_some(std::optional<optim::AnyOptimizer> optimizer) {
  const auto is_meant = [&](const Prepared& each) { return !optimizer || *optimizer == each.optimizer; };
  if (std::ranges::none_of(optimizers_, is_meant)) throw UsageError("Trainer::step was called for an optimizer that was not prepared");
  if (!syncs_) return false;
  const double limit = settings_.number("gradient_clipping");
  std::vector<at::Tensor> to_clip;
  for (auto& each : optimizers_) {
    if (is_meant(each)) average(each);
    if (limit == 0 || !is_meant(each) || each.clipped) continue;
    unscale(each);
    const auto held = parameters_of(each);
    to_clip.insert(to_clip.end(), held.begin(), held.end());
  }
  if (auto* const own = only_optimizer(); own != nullptr && !to_clip.empty()) {
    own->clip_grad_norm(limit);
  } else if (!to_clip.empty()) {
    tessera::clip_grad_norm(to_clip, limit);
  }
  bool changed = true;
  for (auto& each : optimizers_) {
    if (is_meant(each)) changed &= take_step(each);
  }
  world_.step_done();
  update_scale();
  return changed;
}

void Trainer::take_rate(Prepared& optimizer) const {
  if (!optimizer.rate) return;
  const double rate = optimizer.rate->at(optimizer.steps);
  if (auto* const* own = std::get_if<optim::Optimizer*>(&optimizer.optimizer)) return (*own)->set_lr(rate);
  auto& groups = std::get<torch::optim::Optimizer*>(optimizer.optimizer)->param_groups();
  for (size_t i = 0; i < groups.size(); i++) {
    const double first = optimizer.first_rates.front();
    groups[i].options().set_lr(first == 0 ? rate : rate * optimizer.first_rates[i] / first);
  }
}

/// Whether the optimizer has no gradients to step with. Of several optimizers, some may have parameters that this pass has not used.
bool Trainer::has_no_part(const Prepared& optimizer) const {
  auto* const* own = std::get_if<optim::Optimizer*>(&optimizer.optimizer);
  return own != nullptr && optimizers_.size() > 1 && !(*own)->steps_in_backward() && !have_gradients((*own)->parameters());
}

bool Trainer::take_step(Prepared& optimizer) {
  expect_one_scale(optimizer);
  take_rate(optimizer);
  const bool changed = std::visit(
      [&](auto* each) {
        const bool stepped = has_no_part(optimizer) || scaler_.step(*each);
        each->zero_grad();
        return stepped;
      },
      optimizer.optimizer);
  optimizer.averaged = optimizer.clipped = false;
  optimizer.stepped = true;
  if (changed) optimizer.steps++;
  follow_steps(optimizer);
  return changed;
}

/// Steps torch's scheduler until it has taken as many steps as the optimizer. This also restores the scheduler after a resume, because its
/// state can't be saved.
void Trainer::follow_steps(Prepared& optimizer) {
  if (optimizer.scheduler == nullptr) return;
  for (; optimizer.scheduled < optimizer.steps; optimizer.scheduled++) optimizer.scheduler->step();
}

int64_t Trainer::steps() const {
  return optimizers_.empty() ? 0 : optimizers_.front().steps;
}

double Trainer::lr() const {
  if (optimizers_.empty()) throw UsageError("Trainer::lr was called, but prepare() was given no optimizer");
  const auto& first = optimizers_.front().optimizer;
  if (auto* const* own = std::get_if<optim::Optimizer*>(&first)) return (*own)->lr();
  return std::get<torch::optim::Optimizer*>(first)->param_groups().front().options().get_lr();
}

checkpoint::StateDict Trainer::get_state_dict(ConstModuleRef model) const {
  return checkpoint::full_state_dict(model, {.offload_to_cpu = true, .rank0_only = true});
}

void Trainer::save_model(ModuleRef model, const std::filesystem::path& folder, const SaveModelOptions& options) const {
  if (const auto& adapters = checkpoint::adapters(); !adapters.describe(model).empty()) return adapters.save(model, folder, world_);
  checkpoint::save(folder, {.model = &*model}, world_, {.format = checkpoint::Format::Hub, .max_shard_size = options.max_shard_size});
}

void Trainer::skip_first_batches(data::Loader& loader, int64_t batches) {
  auto position = loader.position();
  position.batch += batches;
  loader.seek(position, loader.taken());
}

}  // namespace tessera
