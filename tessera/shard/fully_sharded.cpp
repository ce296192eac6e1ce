#include "tessera/shard/fully_sharded.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/module.h>

#include <algorithm>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/groups/per_group.h"
#include "tessera/comm/mesh.h"
#include "tessera/comm/record.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/unit/ignored_parameters.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {
namespace {

constexpr int64_t kSizeMultiple = 128;  // the default of torch_xla

using torch::nn::Module;

void expect_module(const Module* module, bool has_forward) {
  if (module == nullptr) throw UsageError("FullyShardedDataParallel was given an empty shared_ptr; give it a module");
  const auto name = class_name(*module);
  if (!has_forward) {
    throw UsageError(
        "FullyShardedDataParallel can't wrap a {}, because it has no forward that could be called; wrap the modules in it, or "
        "the module that calls them",
        name);
  }
  if (boundary_of(*module).is_sharded) {
    throw UsageError("FullyShardedDataParallel can't wrap a module twice, and this {} is sharded already; wrap it once", name);
  }
}

void expect_dtype(const char* option, std::optional<at::ScalarType> dtype) {
  if (!dtype || *dtype == at::kFloat || *dtype == at::kHalf || *dtype == at::kBFloat16) return;
  throw UsageError("{} must be Float, Half or BFloat16, not {}", option, c10::toString(*dtype));
}

void expect_parameters(const Module& module, const Communicator& world, const FullyShardedOptions& options) {
  for (const auto& item : module.named_parameters()) {
    const auto& parameter = item.value();
    if (locate(parameter).parameter != nullptr || is_in(options.ignored_parameters, parameter)) continue;
    if (parameter.device() != world.traits().device) {
      throw UsageError("parameter '{}' is on {}, but the ranks communicate on {}; move the module to that device before you wrap it", item.key(),
                       parameter.device().str(), world.traits().device.str());
    }
    if (parameter.scalar_type() != at::kFloat) {
      throw UsageError(
          "parameter '{}' is {}, but FullyShardedDataParallel takes float32 parameters only, and computes with them in "
          "compute_dtype; tessera::fully_shard takes all dtypes",
          item.key(), c10::toString(parameter.scalar_type()));
    }
  }
}

/// Whether each rank has rows of each parameter; on_neuron is the older name.
bool has_rows(const FullyShardedOptions& options) {
  return options.shard_param_on_dim_0 || options.on_neuron;
}

/// Throws UsageError for options that this engine does not support, or that contradict other options. Most of them are arguments of
/// torch_xla that leave no choice here.
void expect_options(const Communicator& world, const FullyShardedOptions& options) {
  struct Row {
    const char* option;
    bool is_refused;
    const char* reason;  // why it is refused; {} is the transport
  };
  constexpr auto kProgram =
      "is for engines that record a program and run it later; transport {} runs each operation at once, so there is nothing to choose; leave "
      "it unset";
  constexpr auto kLayout =
      "can't be true on transport {}: layouts need pinning only where each rank compiles a program of its own, and here all ranks run the same "
      "program; leave it unset";
  const bool traces = world.traits().traces;
  const auto layout = [&](const char* option, std::optional<bool> pins) {
    return Row{option, traces ? pins.value_or(false) : pins.has_value(), traces ? kLayout : kProgram};
  };
  const int dummies = options.debug_dummy_all_gather_op + options.debug_dummy_all_reduce_op + options.debug_dummy_reduce_scatter_op;
  const Row rows[] = {
      {"optimization_barrier_in_forward", !traces && options.optimization_barrier_in_forward, kProgram},
      {"optimization_barrier_in_backward", !traces && options.optimization_barrier_in_backward, kProgram},
      {"mark_step_on_finalization", !traces && options.mark_step_on_finalization, kProgram},
      layout("pin_layout_in_all_reduce", options.pin_layout_in_all_reduce),
      layout("pin_layout_in_all_gather", options.pin_layout_in_all_gather),
      layout("pin_layout_in_reduce_scatter", options.pin_layout_in_reduce_scatter),
      {"shard_param_on_dim_0 (on_neuron)", traces && has_rows(options),
       "can't be set on transport {}: all ranks run the same program, so their parts must have the same size, but rows do not always divide "
       "equally; leave it unset"},
      {"execute_sharding_on_init", !traces && !options.execute_sharding_on_init,
       "can't be false: the memory of the full parameters is freed as they are sharded, in the constructor; leave it true"},
      {"flatten_parameters", options.flatten_parameters && has_rows(options),
       "makes one vector of all parameters, which shard_param_on_dim_0 (on_neuron) can't divide by rows; set only one of the two"},
      {"sharding_groups", !options.sharding_groups.empty() && (!options.sharding_rank || !options.sharding_world_size),
       "needs sharding_rank and sharding_world_size: this rank's place in its group, and the size of the group"},
      {"debug_dummy_all_gather_op, debug_dummy_all_reduce_op and debug_dummy_reduce_scatter_op", dummies == 1 || dummies == 2,
       "belong together: if only some operations communicate, ranks wait for each other forever; set all three, or none"},
  };
  for (const auto& [option, is_refused, reason] : rows) {
    if (is_refused) throw UsageError("{} {}", option, fmt::format(fmt::runtime(reason), world.traits().name));
  }
}

/// Throws UsageError if sharding_rank or sharding_world_size is set, and differs from this rank's place in its group or from the size of
/// the group.
void expect_place(const FullyShardedOptions& options, const Communicator& group) {
  const int own_rank = group.local_ranks().front();
  const int rank = options.sharding_rank.value_or(own_rank), size = options.sharding_world_size.value_or(group.size());
  if (rank == own_rank && size == group.size()) return;
  throw UsageError("sharding_rank {} of sharding_world_size {} does not agree with the {}, where this is rank {} of {}", rank, size,
                   options.sharding_groups.empty() ? "world" : "sharding_groups", own_rank, group.size());
}

ShardOptions shard_options(const FullyShardedOptions& options, const Communicator& world) {
  ShardOptions result{.mesh = world, .ignored = options.ignored_parameters};
  const auto compute = options.compute_dtype.value_or(at::kFloat);
  if (compute != at::kFloat) {
    result.mixed_precision.param_dtype = compute;
    if (options.fp32_reduce_scatter) result.mixed_precision.reduce_dtype = at::kFloat;
  }
  result.mixed_precision.buffer_dtype = options.buffer_dtype.value_or(compute);
  if (has_rows(options)) {
    result.layout = Layout::Rows;
  } else if (!world.traits().traces && world.traits().packing == Packing::OneBuffer) {
    result.shard_size_multiple = options.shard_size_multiple.value_or(kSizeMultiple);
  } else if (options.shard_size_multiple) {
    throw UsageError(
        "shard_size_multiple has no effect on transport {}, where each parameter has a buffer of its own that is divided evenly; "
        "leave it unset",
        world.traits().name);
  }
  if (options.flatten_parameters) result.listing = Listing::Flat;
  const bool barriers = !options.debug_dummy_optimization_barrier_op;
  result.schedule.tracing = {.barrier_in_forward = options.optimization_barrier_in_forward.value_or(barriers),
                    .barrier_in_backward = options.optimization_barrier_in_backward.value_or(barriers),
                    .cuts_after_backward = options.mark_step_on_finalization.value_or(false),
                    .cuts_after_sharding = options.execute_sharding_on_init};
  if (!options.reshard_after_forward || !options.disable_reshard_on_root) result.reshard_after_forward = options.reshard_after_forward;
  return result;
}

std::string dtype_name(std::optional<at::ScalarType> dtype) {
  return c10::toString(dtype.value_or(at::kFloat));
}

}  // namespace

/// Simulated ranks that take the place of a group. Keeps the group alive, because PerGroup identifies groups by address.
struct FullySharded::Simulated {
  Communicator group, ranks;
};

FullySharded::FullySharded(std::shared_ptr<Module> module, bool has_forward, const Communicator& world, FullyShardedOptions options)
    : base_(std::move(module)), options_(std::move(options)), world_(world) {
  expect_module(base_.get(), has_forward);
  expect_dtype("compute_dtype", options_.compute_dtype);
  expect_dtype("buffer_dtype", options_.buffer_dtype);
  expect_options(world, options_);
  expect_parameters(*base_, world, options_);
  if (!options_.sharding_groups.empty()) world_ = Mesh::of_groups(world, options_.sharding_groups).world();
  expect_place(options_, world_);
  if (options_.debug_dummy_all_gather_op) {  // expect_options() has checked that all three debug_dummy_* collectives are set
    static PerGroup<Simulated> all;
    const auto make = [&] { return fake_world(world_.local_ranks().front(), world_.size()); };
    simulated_ = all.get(world_, [&] { return std::make_shared<Simulated>(Simulated{.group = world_, .ranks = make()}); });
    world_ = simulated_->ranks;
  }
  const auto given = shard_options(options_, world_);
  if (options_.auto_wrap_policy) {
    fully_shard(*base_, given, *options_.auto_wrap_policy);
  } else {
    fully_shard(*base_, given);
  }
  if (options_.debug_print) print(fmt::format("wraps {} parameters", parameters().size()));
}

std::vector<at::Tensor> FullySharded::parameters() const {
  return tessera::parameters(*base_);
}

std::vector<at::Tensor> FullySharded::params_with_grad() const {
  auto result = parameters();
  std::erase_if(result, [](const at::Tensor& parameter) { return !parameter.grad().defined(); });
  return result;
}

NoSync FullySharded::no_sync() const {
  return tessera::no_sync(*base_);
}

void FullySharded::set_gradient_divide_factors(double pre, double post, Recurse recurse) const {
  tessera::set_gradient_divide_factors(*base_, {.pre = pre, .post = post}, recurse);
}

at::Tensor FullySharded::clip_grad_norm_(double max_norm, double norm_type) const {
  return clip_grad_norm(parameters(), max_norm, {.p = norm_type});
}

at::Tensor FullySharded::clip_grad_norm_(double max_norm, double norm_type, const std::vector<std::vector<int>>& groups) const {
  const auto of_sharding = options_.sharding_groups.empty() ? std::vector<std::vector<int>>{all_ranks(world_.size())} : options_.sharding_groups;
  if (groups != of_sharding) {
    throw UsageError(
        "clip_grad_norm_ adds norms among the ranks that shard together, {}, and can't add them among {}; leave the groups out",
        fmt::format("{}", of_sharding), fmt::format("{}", groups));
  }
  return clip_grad_norm_(max_norm, norm_type);
}

ShardMetadata FullySharded::get_shard_metadata() const {
  return shard_metadata(*base_, world_);
}

std::vector<std::pair<std::string, at::Tensor>> FullySharded::get_original_names_and_sharded_parameters() const {
  auto result = named_parameters(*base_);
  std::erase_if(result, [](const auto& named) { return locate(named.second).parameter == nullptr; });
  return result;
}

void FullySharded::print(const std::string& what) const {
  log(LogLevel::Info, "{} ({}): {}, {:.1f} MB in memory", options_.debug_msg, class_name(*base_), what, static_cast<double>(resident_bytes()) / 1e6);
}

FullySharded::Report::Report(const FullySharded& of) : of_(of) {
  if (of_.options_.debug_print) of_.print("forward begins");
}

FullySharded::Report::~Report() {
  if (of_.options_.debug_print) of_.print("forward ends");
}

at::Tensor FullySharded::dummy_forward(const std::vector<at::Tensor>& inputs) const {
  const ForwardCall boundary(*base_);
  auto sum = at::zeros({}, at::TensorOptions(world_.traits().device));
  const auto add = [&](const at::Tensor& tensor) {
    if (at::isFloatingType(tensor.scalar_type())) sum = sum + tensor.mean(at::kFloat);
  };
  for (const auto& input : inputs) add(input);
  for (const auto& unit : units(*base_)) {
    for (const auto& parameter : parameters_of(*unit)) {
      if (const auto full = parameter.unsharded.lock(); full.defined()) add(full);
    }
  }
  return sum;
}

void FullySharded::refuse_dummy_forward() {
  throw UsageError("debug_dummy_forward_pass returns one tensor, and the forward of this module returns something else; leave the option unset");
}

bool FullySharded::reshards_after_forward() const {
  const auto own = units_of(*base_);
  return own.empty() ? options_.reshard_after_forward : !LockedState(*own.front())->stays_after_forward();
}

std::ostream& operator<<(std::ostream& out, const FullySharded& sharded) {
  const auto& options = sharded.options_;
  std::ostringstream inner;
  inner << *sharded.base_;
  auto text = inner.str();
  for (size_t at = 0; (at = text.find('\n', at)) != std::string::npos; at += 3) text.replace(at, 1, "\n  ");
  return out << fmt::format(
             "FullyShardedDataParallel(\n  world_size={}, rank={}, compute_dtype={}, buffer_dtype={}, flatten_parameters={}, "
             "reshard_after_forward={}, sharding_groups={}\n  (module): {}\n)",
             sharded.world_.size(), sharded.world_.local_ranks().front(), dtype_name(options.compute_dtype),
             dtype_name(options.buffer_dtype ? options.buffer_dtype : options.compute_dtype), options.flatten_parameters,
             sharded.reshards_after_forward(), options.sharding_groups.empty() ? "None" : fmt::format("{}", options.sharding_groups), text);
}

}  // namespace tessera
