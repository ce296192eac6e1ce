// Makes a unit of parameters: their tensors stay the same objects and get new memory.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/shard/deferred/values.h"
#include "tessera/shard/unit/parameter_meta.h"
#include "tessera/shard/unit/start_values.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

constexpr int64_t kAlignment = 64;  // bytes; the alignment that libtorch's allocator gives every tensor

/// Throws UsageError if reduce_dtype is not possible: gradients have the dtype of the unsharded parameters and may be sent in a narrower
/// dtype, and sums are at least float32.
void expect_reducible(at::ScalarType unsharded, const MixedPrecision& precision) {
  if (!precision.reduce_dtype || !at::isFloatingType(unsharded)) return;
  const auto wanted = *precision.reduce_dtype;
  const auto sum = at::promoteTypes(unsharded, at::kFloat);
  if (wanted == unsharded || c10::elementSize(wanted) < c10::elementSize(unsharded) || wanted == sum) return;
  throw UsageError("gradients of {} can't be reduced in {}; leave reduce_dtype unset to add them in {}", c10::toString(unsharded),
                   c10::toString(wanted), c10::toString(sum));
}

/// The dtype of sharded gradients. Throws UsageError if grad_dtype would round them.
at::ScalarType gradient_dtype(at::ScalarType stored, const MixedPrecision& precision) {
  if (!precision.grad_dtype || *precision.grad_dtype == stored || !at::isFloatingType(stored)) return stored;
  if (!compat::kHasGradDtype)
    throw UsageError("grad_dtype needs a newer libtorch, in which a gradient may have another dtype than its tensor");
  if (at::promoteTypes(stored, *precision.grad_dtype) == *precision.grad_dtype) return *precision.grad_dtype;
  throw UsageError(
      "grad_dtype {} can't hold the gradients of {} shards; give {} or a wider one, and reduce_dtype for a narrower form in "
      "which they are sent",
      c10::toString(*precision.grad_dtype), c10::toString(stored), c10::toString(stored));
}

std::string freed_message(const std::string& unit) {
  return fmt::format(
      "the parameters of unit '{}' are sharded and not in memory now; operators unshard them by themselves, "
      "but raw pointers need tessera::full_params(module)",
      unit);
}

/// One group for each combination of dtype and requires_grad, sorted so that groups of one dtype are neighbours and share a collective.
/// Layouts that split each parameter by itself have one group for each parameter.
std::vector<std::vector<ManagedParameter>> grouped(std::vector<ManagedParameter> managed, UnitLayout layout) {
  std::map<std::pair<at::ScalarType, bool>, std::vector<ManagedParameter>> kinds;
  for (auto& parameter : managed) {
    const auto kind = std::make_pair(parameter.tensor.scalar_type(), !parameter.tensor.requires_grad());
    kinds[kind].push_back(std::move(parameter));
  }
  std::vector<std::vector<ManagedParameter>> groups;
  for (auto& [kind, members] : kinds) {
    if (layout == UnitLayout::Flat || layout == UnitLayout::WholeParameters) {
      groups.push_back(std::move(members));
    } else {
      for (auto& member : members) groups.push_back({std::move(member)});
    }
  }
  return groups;
}

UnitLayout chosen_layout(const ShardOptions& options) {
  const auto& traits = options.mesh->shard().traits();
  const auto wanted = options.layout;
  if (options.listing == Listing::Flat && (wanted == Layout::Rows || wanted == Layout::WholeParameters)) {
    throw UsageError(
        "Listing::Flat lists one vector of all parameters, which only Layout::Flat has; leave the layout out, or list by name");
  }
  if (traits.traces && wanted != Layout::Auto) {
    throw UsageError("transport {} represents all ranks, so it chooses the layout itself; leave ShardOptions::layout at Auto", traits.name);
  }
  auto layout = traits.packing == Packing::OneBuffer ? UnitLayout::Flat : UnitLayout::Rows;
  if (traits.traces) layout = UnitLayout::PaddedChunks;
  if (wanted == Layout::Flat) layout = UnitLayout::Flat;
  if (wanted == Layout::Rows) layout = UnitLayout::Rows;
  if (wanted == Layout::WholeParameters) layout = UnitLayout::WholeParameters;
  if (options.shard_size_multiple < 1) {
    throw UsageError("ShardOptions::shard_size_multiple is {}; it is a number of values, at least 1", options.shard_size_multiple);
  }
  if (options.shard_size_multiple > 1 && layout != UnitLayout::Flat) {
    throw UsageError("ShardOptions::shard_size_multiple pads the chunks of Layout::Flat; with another layout leave it at 1");
  }
  if (options.shard_dim && layout != UnitLayout::Rows) {
    throw UsageError("ShardOptions::shard_dim chooses the dimension that Layout::Rows splits; set that layout, or leave shard_dim out");
  }
  return layout;
}

CodecPtr chosen_codec(const ShardOptions& options) {
  if (!options.codec) return cast_codec(options.mixed_precision.param_dtype);
  if (options.mixed_precision.param_dtype) {
    throw UsageError("ShardOptions::codec and param_dtype both set the dtype that operators compute with; give one of them");
  }
  return options.codec;
}

/// Throws UsageError if a codec says that two forms are the same, but describes them differently.
void expect_consistent(const Codec& codec, at::ScalarType stored, int64_t numel) {
  const auto sent = codec.sent(stored, numel);
  if (sent.numel < 0 || at::isFloatingType(codec.computed(stored)) != at::isFloatingType(stored)) {
    throw UsageError(
        "the codec sends {} values for {}, and computes with {} for {}; let sent() return at least 0 values, and computed() a "
        "floating-point dtype for floating-point values only",
        sent.numel, numel, c10::toString(codec.computed(stored)), c10::toString(stored));
  }
  const auto refuse = [&](std::string_view verb, at::ScalarType other) {
    throw UsageError("the codec does not {}, but it sends {} values of {} as {} of {}; let {}s() return true", verb, numel,
                     c10::toString(other), sent.numel, c10::toString(sent.dtype), verb);
  };
  if (!codec.encodes(stored) && (sent.dtype != stored || sent.numel != numel)) refuse("encode", stored);
  const auto computed = codec.computed(stored);
  if (!codec.decodes(stored) && (sent.dtype != computed || sent.numel != numel)) refuse("decode", computed);
}

/// Returns the number of values in one row of the dimension that is split: shard_dim, or else the outermost in memory. Leaves out
/// dimensions of size 1, because their strides mean nothing.
int64_t row_of(const ManagedParameter& parameter) {
  if (parameter.tensor.numel() == 0) return 0;
  if (parameter.shard_dim) return parameter.tensor.numel() / parameter.tensor.size(*parameter.shard_dim);
  const auto values = dense(parameter);
  int64_t rows = 1, widest = 0;
  for (int64_t i = 0; i < values.dim(); i++) {
    if (values.size(i) <= 1 || values.stride(i) <= widest) continue;
    widest = values.stride(i);
    rows = values.size(i);
  }
  return values.numel() / rows;
}

/// Asks ShardOptions::shard_dim about each parameter.
void choose_dims(std::vector<ManagedParameter>& managed, const ShardOptions& options) {
  if (!options.shard_dim) return;
  for (auto& parameter : managed) {
    const auto dims = parameter.tensor.dim();
    auto& dim = parameter.shard_dim;
    if (held_form(parameter.tensor) != nullptr) continue;  // the rows of a held tensor are blocks of values
    dim = options.shard_dim(parameter.name, parameter.tensor);
    if (!dim) continue;
    if (*dim < -dims || *dim >= dims) {
      throw UsageError("ShardOptions::shard_dim says {} for parameter '{}', which has {} dimensions; {}", *dim, parameter.name, dims,
                       dims == 0 ? "return nothing for it" : fmt::format("choose one from {} to {}", -dims, dims - 1));
    }
    if (*dim < 0) *dim += dims;
  }
}

BufferLayout layout_of(std::span<const ManagedParameter> managed, UnitLayout layout, const ShardOptions& options) {
  const auto& first = managed.front().tensor;
  const auto& shard = options.mesh->shard();
  if (layout == UnitLayout::PaddedChunks) return padded_chunk_layout(first.numel(), shard.size());
  const RankPlace place{.rank = shard.rank(), .ranks = shard.size()};
  if (layout == UnitLayout::Rows) return row_layout(first.numel(), row_of(managed.front()), place);
  std::vector<int64_t> numels;
  for (const auto& parameter : managed) numels.push_back(parameter.tensor.numel());
  // Depends on the dtype of the shards and not on param_dtype, so that a checkpoint can be resumed with another param_dtype.
  const auto alignment = kAlignment / static_cast<int64_t>(c10::elementSize(first.scalar_type()));
  if (layout == UnitLayout::WholeParameters) return whole_parameter_layout(numels, alignment, place);
  return flat_layout(numels, alignment, place, options.shard_size_multiple);
}

/// The values that the shard of a span holds: a range for each rank that this process represents.
std::vector<ValueRange> ranges_of(const Span& span, UnitLayout layout, const Mesh& mesh) {
  if (layout != UnitLayout::PaddedChunks) return {{.begin = span.shard_begin, .numel = span.shard_numel}};
  std::vector<ValueRange> ranges;
  for (const int rank : mesh.world().local_ranks()) {
    const auto begin = std::min(rank % mesh.shape().shard * span.shard_numel, span.numel);
    ranges.push_back({.begin = begin, .numel = std::min(span.numel - begin, span.shard_numel)});
  }
  return ranges;
}

/// The shard of a parameter. It has the same number of dimensions, so that programs can still tell matrices from biases by `dim() >= 2`.
at::Tensor shard_of(const TaggedStoragePtr& storage, at::ScalarType dtype, const Span& span, int64_t dim, bool trained, size_t index) {
  std::vector<int64_t> sizes(static_cast<size_t>(std::max<int64_t>(dim, 1)), 1), strides(sizes);
  sizes.front() = span.shard_numel;
  // The offset of an empty shard does not identify its parameter, so its stride, which has no other meaning, holds the index: see around().
  if (span.shard_numel == 0) strides.front() = static_cast<int64_t>(index) + 1;
  return paged_view(c10::Storage(storage), dtype, sizes, strides, span.shard_offset).set_requires_grad(trained);
}

/// The device on which operators compute with the parameters. If a model is larger than its device, its parameters may start without
/// values, or on the host if their shards stay there.
c10::Device device_of_unit(const ManagedParameter& parameter, const ShardOptions& options) {
  const auto communicates = options.mesh->world().traits().device;
  const auto device = device_of_values(parameter.tensor, communicates);
  return device.is_cpu() && (options.offload.parameters == OffloadTo::Host || lacks_values(parameter.tensor)) ? communicates : device;
}

/// Returns the options that a unit keeps: without `replicated` and `left_out`, and without functions that may have captured parameters.
/// Parameters own their unit, so a unit that owned parameters would never be destroyed.
ShardOptions without_parameters(ShardOptions options) {
  options.replicated = options.left_out = {};
  options.shard_dim = {};
  options.param_init_fn = {};
  return options;
}

}  // namespace

/// A group whose shards have their values, while its parameters are still unchanged.
struct Unit::Prepared {
  Group group;
  std::vector<at::Tensor> members;  // the parameters, as the modules have them
  TaggedStoragePtr unsharded;
};

std::shared_ptr<Unit> Unit::make(std::string name, std::vector<ManagedParameter> managed, const ShardOptions& options) {
  expect_shardable(managed);
  choose_dims(managed, options);
  const auto unit_layout = chosen_layout(options);
  auto unit_codec = chosen_codec(options);
  bool decodes = false;
  for (const auto& parameter : managed) {
    const auto stored = parameter.tensor.scalar_type();
    expect_reducible(unit_codec->computed(stored), options.mixed_precision);
    gradient_dtype(stored, options.mixed_precision);
    decodes = decodes || unit_codec->decodes(stored);
  }
  const auto device = device_of_unit(managed.front(), options);
  FormerMemory former(managed);
  auto groups = grouped(std::move(managed), unit_layout);
  const BelowPaging below;
  const auto number = options.mesh->world().next_number();  // taken even if this rank fails below, so that all ranks count alike
  // All memory is allocated and filled before the first parameter changes, so that the model stays as it was if that fails.
  std::shared_ptr<Unit> unit;
  std::vector<BufferLayout> layouts;
  std::vector<MemoryPtr> memory;
  Starts starts(options, name);
  starts.expect_sendable(groups);
  const auto allocate = [&] {
    unit.reset(new Unit(name, number, without_parameters(options), unit_layout, std::move(unit_codec),
                        make_unit_memory(options, decodes, device), device));
    for (const auto& group : groups) {
      const auto& first = group.front().tensor;
      const auto chunk = layouts.emplace_back(layout_of(group, unit_layout, options)).chunk;
      expect_consistent(*unit->codec_, first.scalar_type(), chunk);
      memory.push_back(unit->memory_.chunks->add({.unit = name,
                                                  .chunk = chunk,
                                                  .dtype = first.scalar_type(),
                                                  .codec = unit->codec_.get(),
                                                  .device = device,
                                                  .trained = first.requires_grad()}));
    }
  };
  // The ranks compare whether all could allocate, because a disk may be full on a single host.
  const bool on_disk = options.offload.parameters == OffloadTo::Disk;
  on_disk ? all_or_none(options.mesh->world(), {.unit = name}, "has no room for its parameters", allocate) : allocate();
  std::vector<Prepared> prepared;
  for (size_t i = 0; i < groups.size(); i++) prepared.push_back(unit->prepare(groups[i], layouts[i], i, std::move(memory[i]), starts));
  starts.expect_all();
  for (auto& group : prepared) unit->add_group(std::move(group));
  former.abandon();
  for (const auto& group : unit->groups_) {
    for (const auto& parameter : group.parameters) unit->parameters_[parameter.unsharded.lock().unsafeGetTensorImpl()] = &parameter;
    for (const auto& parameter : group.listed()) unit->parameters_[parameter.shard.unsafeGetTensorImpl()] = &parameter;
  }
  return unit;
}

Unit::Prepared Unit::prepare(std::span<const ManagedParameter> managed, const BufferLayout& layout, size_t number, MemoryPtr memory,
                             Starts& starts) {
  const auto& shard = mesh().shard();
  const auto stored = managed.front().tensor.scalar_type(), computed = codec_->computed(stored);
  const bool trained = managed.front().tensor.requires_grad();
  const auto own_storage = make_storage(Role::Sharded, number, layout.chunk, stored);
  Prepared result{.group = {.dtype = stored,
                            .unsharded_dtype = computed,
                            .gradient_dtype = gradient_dtype(stored, options_.mixed_precision),
                            .chunk = layout.chunk,
                            .converts = codec_->encodes(stored) || codec_->decodes(stored),
                            .optimizers_cast = stored == at::kFloat && computed == at::kBFloat16 && !options_.codec,
                            .number = number},
                  .members = {},
                  .unsharded = make_storage(Role::Unsharded, number, layout.chunk * shard.size(), computed)};
  auto& group = result.group;
  own_storage->attach(std::move(memory));
  group.own = own_storage->memory_view(stored).zero_();
  result.unsharded->explain(freed_message(name_));
  group.unsharded = c10::weak_intrusive_ptr<TaggedStorage>(result.unsharded);
  if (options_.listing == Listing::Flat) {
    const auto numel = layout.chunk * shard.size();
    const auto begin = layout_ == UnitLayout::PaddedChunks ? 0 : shard.rank() * layout.chunk;
    const Span span{.numel = numel, .shard_numel = layout.chunk, .shard_begin = begin};
    const auto name = fmt::format("flat_param_{}", number);
    group.flat = Parameter{.name = name,
                           .local_name = name,
                           .shard = shard_of(own_storage, stored, span, 1, trained, 0),
                           .sizes = {numel},
                           .strides = {1},
                           .span = span,
                           .ranges = ranges_of(span, layout_, mesh())};
  }
  for (size_t i = 0; i < managed.size(); i++) {
    const auto& [name, tensor, index, other_names, dim] = managed[i];
    const auto& span = layout.spans[i];
    auto start = starts.of(managed[i], span);
    group.fingerprint = group.fingerprint * 31 + start.fingerprint;
    const auto own = group.own.narrow(0, span.shard_offset, span.shard_numel);
    if (start.all.defined()) {
      own.copy_(layout_ == UnitLayout::PaddedChunks ? shard.own_chunk(start.all) : start.all.narrow(0, span.shard_begin, span.shard_numel));
    } else if (start.part.defined()) {
      own.copy_(start.part);
    }
    group.parameters.push_back({.name = name,
                                .local_name = name,
                                .other_names = other_names,
                                .index = index,
                                .shard = group.flat ? group.flat->shard : shard_of(own_storage, stored, span, tensor.dim(), trained, i),
                                .sizes = std::move(start.sizes),
                                .strides = std::move(start.strides),
                                .span = span,
                                .ranges = ranges_of(span, layout_, mesh()),
                                .source = c10::make_intrusive<SourceParameter>(shared_from_this(), number, i),
                                .unsharded = WeakTensor(tensor),
                                .unset = !start.known()});
    result.members.push_back(tensor);
  }
  return result;
}

void Unit::add_group(Prepared prepared) {
  auto& group = prepared.group;
  for (size_t i = 0; i < prepared.members.size(); i++) {
    const auto& parameter = group.parameters[i];
    const auto member = std::exchange(prepared.members[i], {});
    flags_.unset += parameter.unset ? 1 : 0;
    abandon_values(member);
    // The tensor that the module holds becomes a view of the unsharded storage: the same object with the same sizes, but other memory.
    // set_data would refuse a change of dtype, and devices that libtorch does not know.
    const auto view =
        paged_view(c10::Storage(prepared.unsharded), group.unsharded_dtype, parameter.sizes, parameter.strides, parameter.span.offset);
    member.unsafeGetTensorImpl()->shallow_copy_from(view.getIntrusivePtr());
    UnshardedMeta::replace(member, parameter.shard, options_.listing);
    if (!group.flat) ShardedMeta::replace(parameter.shard, member);
    if (group.gradient_dtype != group.dtype) compat::set_grad_dtype(parameter.shard, group.gradient_dtype);
  }
  groups_.push_back(std::move(group));
}

void Unit::rename(const std::string& name) {
  name_ = name;
  for (auto& group : groups_) {
    if (const auto unsharded = group.unsharded.lock()) unsharded->explain(freed_message(name_));
    // With Listing::Flat, no module lists the single parameters, so fully_shard does not rename them; they are renamed here.
    if (!group.flat) continue;
    for (auto& parameter : group.parameters) parameter.name = name + "." + parameter.local_name;
  }
}

}  // namespace tessera
