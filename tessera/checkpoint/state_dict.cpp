#include "tessera/checkpoint/state_dict.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/live/dict_source.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/live/rank_contents.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/full_params.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kLoadFailed = "can't load its state dict; nothing was changed";

/// Visits the parts that this rank has: of a parameter in a unit its shard, of all else the whole tensor.
template <class Visit>
void for_each_part(const torch::nn::Module& model, const ShardedStateDictOptions& options, const Communicator& world, const Visit& visit) {
  expect_one_rank(world);
  const auto values = local_values(model);
  expect_values(values, "a state dict");
  const auto whole = [&](const std::string& name, const at::Tensor& tensor) {
    visit(name, whole_record(tensor.sizes()), tensor.contiguous().view({-1}));
  };
  const auto is_left_out = [&](const std::string& name) { return options.ignore_frozen_params && values.frozen.contains(name); };
  for (const auto& part : values.parts) {
    if (is_left_out(part.name)) continue;
    auto record = records_of(part).front();
    const auto numel = record.numel();
    visit(part.name, std::move(record), part.values.narrow(0, 0, numel));
  }
  for (const auto& [name, tensor] : values.outside) {
    if (!is_left_out(name)) whole(name, tensor);
  }
  for (const auto& [name, tensor] : values.buffers) whole(name, tensor.to(original_dtype(tensor)));
}

at::Tensor copy_of(const at::Tensor& values, const ShardedStateDictOptions& options) {
  const auto device = options.offload_to_cpu ? c10::Device(at::kCPU) : values.device();
  return values.to(device, values.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

void load(torch::nn::Module& model, std::unique_ptr<ValueSource> source, const LoadOptions& options, const Communicator& world) {
  LocalValues values;
  std::optional<ModelPlan> plan;
  all_or_none(world, kStateDict, kLoadFailed, [&] {
    adapters().expect_unmerged(model);
    values = local_values(model);
  });
  const auto elsewhere = names_elsewhere(values, world);
  all_or_none(world, kStateDict, kLoadFailed, [&] {
    std::set<std::string> names;
    for (const auto& [name, tensor] : source->catalog().tensors) {
      if (!elsewhere.contains(name)) names.insert(name);
    }
    plan.emplace(std::move(source), std::move(names), values, options, "the state dict");
    expect_writable(values.units);
  });
  const WriteGuard guard(values.units, WriteKind::Load);
  plan->load(local_values(model), world);  // read again, because the guard may have moved shards into other memory
}

template <class Dict>
void load_own_part(torch::nn::Module& model, const Dict& dict, const LoadStateDictOptions& options, std::string_view what) {
  expect_idle(what);
  const c10::AutoGradMode no_grad(false);
  const auto world = world_for(model);
  load(model, source_of(dict, world, kLoadFailed),
       {.may_be_missing = options.may_be_missing, .may_be_unknown = options.may_be_unknown, .first_of_tied = options.first_of_tied}, world);
}

}  // namespace

StateDict full_state_dict(ConstModuleRef model, const FullStateDictOptions& options) {
  const Calling calling("checkpoint::full_state_dict");
  expect_idle("full_state_dict");
  const c10::AutoGradMode no_grad(false);
  const auto world = world_for(model);
  LocalValues values;
  all_or_none(world, kStateDict, "can't make its state dict", [&] {
    values = local_values(model);
    expect_values(values, "a state dict");
    warn_of_lost_ties(values, world);
  });
  expect_all_on_each(values, world, "a state dict");
  return full_state(model, options.rank0_only ? Ranks::First : Ranks::All, BufferSync::Rank0,
                    options.offload_to_cpu ? CopyTo::Host : CopyTo::Device,
                    options.ignore_frozen_params ? Frozen::LeftOut : Frozen::Included);
}

void load_full_state_dict(ModuleRef model, const StateDict& dict, const LoadFullStateDictOptions& options) {
  const Calling calling("checkpoint::load_full_state_dict");
  expect_idle("load_full_state_dict");
  const c10::AutoGradMode no_grad(false);
  const auto whose = options.broadcast_from_rank0 ? DictOf::Rank0 : DictOf::EachRank;
  const auto world = world_for(model, whose);
  load(model, source_of(dict, whose, world, kLoadFailed),
       {.may_be_missing = options.may_be_missing, .may_be_unknown = options.may_be_unknown, .first_of_tied = options.first_of_tied}, world);
}

ShardedStateDict sharded_state_dict(ConstModuleRef model, const ShardedStateDictOptions& options) {
  const Calling calling("checkpoint::sharded_state_dict");
  expect_idle("sharded_state_dict");
  const c10::AutoGradMode no_grad(false);
  ShardedStateDict dict;
  for_each_part(model, options, world_for(model), [&](const std::string& name, PartRecord record, const at::Tensor& values) {
    auto views = views_of_slices(copy_of(values, options), record.slices, record.strides);
    dict[name] = {
        .dtype = values.scalar_type(), .shape = std::move(record.shape), .slices = std::move(record.slices), .values = std::move(views)};
  });
  return dict;
}

LocalStateDict local_state_dict(ConstModuleRef model, const LocalStateDictOptions& options) {
  const Calling calling("checkpoint::local_state_dict");
  expect_idle("local_state_dict");
  const c10::AutoGradMode no_grad(false);
  LocalStateDict dict;
  for_each_part(model, options, world_for(model), [&](const std::string& name, PartRecord record, const at::Tensor& values) {
    dict[name] = {.shape = std::move(record.shape),
                  .strides = std::move(record.strides),
                  .slices = std::move(record.slices),
                  .values = copy_of(values, options)};
  });
  return dict;
}

void load_sharded_state_dict(ModuleRef model, const ShardedStateDict& dict, const LoadStateDictOptions& options) {
  const Calling calling("checkpoint::load_sharded_state_dict");
  load_own_part(model, dict, options, "load_sharded_state_dict");
}

void load_local_state_dict(ModuleRef model, const LocalStateDict& dict, const LoadStateDictOptions& options) {
  const Calling calling("checkpoint::load_local_state_dict");
  load_own_part(model, dict, options, "load_local_state_dict");
}

}  // namespace tessera::checkpoint
