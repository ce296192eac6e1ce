#include "tessera/checkpoint/state_dict.h"

#include <ATen/ATen.h>

#include "tessera/checkpoint/live/contents.h"
#include "tessera/checkpoint/live/dict_source.h"
#include "tessera/checkpoint/live/model_plan.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/checkpoint/live/rank_contents.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/access/buffer_dtype.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/full_params.h"

namespace tessera::checkpoint {
namespace {

constexpr auto kLoadFailed = "can't load its state dict; nothing was changed";

/// Returns this rank's shard of each parameter in a unit, and all other tensors whole.
LocalStateDict own_part(const torch::nn::Module& model, const StateDictOptions& options) {
  expect_own_part(world_for(model), options);
  const auto values = local_values(model);
  expect_values(values, "a state dict");
  LocalStateDict dict;
  const auto add = [&](const std::string& name, PartRecord record, const at::Tensor& flat) {
    if (options.ignore_frozen_params && values.frozen.contains(name)) return;
    const auto own = flat.narrow(0, 0, record.numel());
    dict[name] = {.shape = std::move(record.shape),
                  .strides = std::move(record.strides),
                  .slices = std::move(record.slices),
                  .values = copied(own, options)};
  };
  const auto add_whole = [&](const std::string& name, const at::Tensor& tensor) {
    add(name, whole_record(tensor.sizes()), tensor.contiguous().view({-1}));
  };
  for (const auto& part : values.parts) add(part.name, records_of(part).front(), part.values);
  for (const auto& [name, tensor] : values.outside) add_whole(name, tensor);
  for (const auto& [name, tensor] : values.buffers) add_whole(name, tensor.to(original_dtype(tensor)));
  return dict;
}

template <class Dict>
void load_dict(std::string_view function, const torch::nn::Module& model, const Dict& dict, const LoadStateDictOptions& options) {
  const OuterCall call(function);
  const auto world = world_for(model, options);
  auto source = source_of(dict, options, world, kLoadFailed);
  ModelPlan plan(model, world, kStateDict, "its state dict");
  plan.together([&] {
    plan.fit(std::move(source),
             {.may_be_missing = options.may_be_missing, .may_be_unknown = options.may_be_unknown, .first_of_tied = options.first_of_tied},
             "the state dict");
  });
  plan.load();
}

}  // namespace

StateDict full_state_dict(ConstModuleRef model, const StateDictOptions& options) {
  const OuterCall call("checkpoint::full_state_dict");
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

ShardedStateDict sharded_state_dict(ConstModuleRef model, const StateDictOptions& options) {
  const OuterCall call("checkpoint::sharded_state_dict");
  ShardedStateDict dict;
  for (auto& [name, tensor] : own_part(model, options)) dict[name] = boxes_of(std::move(tensor));
  return dict;
}

LocalStateDict local_state_dict(ConstModuleRef model, const StateDictOptions& options) {
  const OuterCall call("checkpoint::local_state_dict");
  return own_part(model, options);
}

void load_full_state_dict(ModuleRef model, const StateDict& dict, const LoadStateDictOptions& options) {
  load_dict("checkpoint::load_full_state_dict", model, dict, options);
}

void load_sharded_state_dict(ModuleRef model, const ShardedStateDict& dict, const LoadStateDictOptions& options) {
  load_dict("checkpoint::load_sharded_state_dict", model, dict, options);
}

void load_local_state_dict(ModuleRef model, const LocalStateDict& dict, const LoadStateDictOptions& options) {
  load_dict("checkpoint::load_local_state_dict", model, dict, options);
}

}  // namespace tessera::checkpoint
