#include "tessera/shard/unit/agreement.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <initializer_list>

#include "tessera/base/error.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/shard/weight_forms.h"

namespace tessera {
namespace {

std::string dtype_text(const std::optional<at::ScalarType>& dtype) {
  return dtype ? c10::toString(*dtype) : "unset";
}

/// Returns the name of a value of an enum, given the names of all values.
template <typename Enum>
std::string_view word(Enum value, std::initializer_list<std::string_view> names) {
  const auto index = static_cast<size_t>(value);
  return index < names.size() ? names.begin()[index] : "unknown";
}

/// The facts that must be the same on all ranks, one per line: the name of the fact, a tab, and its value.
std::string description_of(const std::string& name, std::span<const ManagedParameter> sharded, std::span<const ManagedParameter> replicated,
                           const ShardOptions& options) {
  std::vector<std::string> lines = {"the module\t" + name};
  const auto add = [&](const ManagedParameter& parameter, std::string_view how) {
    const auto& tensor = parameter.tensor;
    lines.push_back(fmt::format("parameter '{}'\tof {} [{}], {}{}", parameter.name, c10::toString(tensor.scalar_type()),
                                fmt::join(tensor.sizes(), ", "), tensor.requires_grad() ? "trained" : "frozen", how));
    // Values are sent and divided in the order in which they lie in memory.
    if (!tensor.is_contiguous()) lines.back() += fmt::format(", strides [{}]", fmt::join(tensor.strides(), ", "));
    if (const auto* const form = held_form(tensor)) {
      lines.back() += ", held as " + form->name;
    } else if (options.shard_dim) {
      if (const auto dim = options.shard_dim(parameter.name, tensor)) lines.back() += fmt::format(", divided along {}", *dim);
    }
    if (!parameter.other_names.empty()) lines.back() += fmt::format(", tied to {}", fmt::join(parameter.other_names, ", "));
  };
  for (const auto& parameter : sharded) add(parameter, "");
  for (const auto& parameter : replicated) add(parameter, ", replicated");
  const auto shape = options.mesh->shape();
  const auto& precision = options.mixed_precision;
  const auto& after_forward = options.reshard_after_forward;
  const auto option = [&](std::string_view option_name, const auto& value) { lines.push_back(fmt::format("{}\t{}", option_name, value)); };
  option("replicas in the mesh", shape.replicate);
  option("param_dtype", dtype_text(precision.param_dtype));
  option("reduce_dtype", dtype_text(precision.reduce_dtype));
  option("grad_dtype", dtype_text(precision.grad_dtype));
  option("buffer_dtype", dtype_text(precision.buffer_dtype));
  option("output_dtype", dtype_text(precision.output_dtype));
  option("start", word(options.start, {"Equal", "FromRank0", "Loaded"}));
  option("listing", word(options.listing, {"ByName", "Flat"}));
  option("residence", word(options.residence.value_or(Residence::Auto), {"Auto", "Gathered", "NodeShared"}));
  option("layout", word(options.layout, {"Auto", "Flat", "Rows", "WholeParameters"}));
  option("shard_size_multiple", options.shard_size_multiple);
  option("max_live_units", options.schedule.max_live_units);
  option("reshard_after_forward of inner units", after_forward.keeps(false) ? 1 : after_forward.ranks(shape.shard));
  option("reshard_after_forward of the root", after_forward.keeps(true) ? 1 : after_forward.ranks(shape.shard));
  option("backward_prefetch", word(options.schedule.backward_prefetch, {"Pre", "Post", "None"}));
  option("forward_prefetch", options.schedule.forward_prefetch);
  option("prefetch_depth", options.schedule.prefetch_depth.value_or(1));
  option("limit_all_gathers", options.schedule.limit_all_gathers);
  option("unused_parameters", word(options.schedule.unused_parameters, {"Refuse", "Zeros"}));
  option("offload.parameters", word(options.offload.parameters, {"Nowhere", "Host", "Disk"}));
  option("codec", options.codec ? "given" : "unset");
  option("shard_dim", options.shard_dim ? "given" : "unset");
  option("param_init_fn", options.param_init_fn ? "given" : "unset");
  return fmt::format("{}\n", fmt::join(lines, "\n"));
}

}  // namespace

void expect_same_unit(const std::string& name, std::span<const ManagedParameter> sharded, std::span<const ManagedParameter> replicated,
                      const ShardOptions& options) {
  const auto& world = options.mesh->world();
  if (!world.traits().can_differ()) return;
  const auto different = difference_on_ranks(world, description_of(name, sharded, replicated, options), {.unit = name});
  if (different.empty()) return;
  throw DisagreementError(
      "ranks call fully_shard for different modules, or with different options; build the same model in the same way on all of "
      "them. {}",
      different);
}

}  // namespace tessera
