#include "tessera/shard/unit/gradient_reduction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/unit_state.h"

namespace tessera {
namespace {

/// The dtype in which gradients are sent. A reduce_dtype that is wider than the gradients has no effect here: widening them before they are
/// sent would change no bit of the sum, which is computed in at least float32.
at::ScalarType wire_dtype(const Unit::Group& group, const MixedPrecision& precision) {
  const auto wanted = precision.reduce_dtype.value_or(group.unsharded_dtype);
  return c10::elementSize(wanted) < c10::elementSize(group.unsharded_dtype) ? wanted : group.unsharded_dtype;
}

}  // namespace

GradientReduction::Packing GradientReduction::begin(std::span<const Unit::Group* const> groups) {
  finish();
  return {*this, groups};
}

GradientReduction::Packing::Packing(GradientReduction& reduction, std::span<const Unit::Group* const> groups)
    : reduction_(reduction), groups_(groups.begin(), groups.end()) {
  c10::SmallVector<GradientPlan, 2> plans;
  for (const auto* group : groups) {
    plans.push_back({.numel = group->chunk * reduction.unit_.mesh().shard().size(),
                     .dtype = wire_dtype(*group, reduction.unit_.options().mixed_precision),
                     .device = group->own.device()});
  }
  buffers_ = reduction.memory_.gradient_buffers(plans);
}

void GradientReduction::Packing::pack(size_t group, std::span<const Unit::Parameter* const> parameters,
                                      std::span<const at::Tensor> gradients) {
  const auto& buffer = buffers_.buffers[group];
  int64_t end = 0;
  const auto fill_gap = [&](int64_t begin) {
    if (begin > end) buffer.narrow(0, end, begin - end).zero_();
  };
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const auto& parameter = *parameters[i];
    fill_gap(parameter.span.offset);
    reduction_.memory_.pack(buffer.as_strided(parameter.sizes, parameter.strides, parameter.span.offset),
                            gradient.is_sparse() ? gradient.to_dense() : gradient);
    end = parameter.span.offset + parameter.span.numel;
  }
  fill_gap(buffer.numel());
}

void GradientReduction::Packing::start(std::string_view name, uint64_t members) {
  auto& reduction = reduction_;
  c10::SmallVector<Piece, 2> pieces;
  c10::SmallVector<GradientMemory, 2> reduced;
  for (size_t i = 0; i < groups_.size(); i++) {
    const auto& memory = reduction.make_memory(*groups_[i]);
    pieces.push_back({.whole = buffers_.buffers[i], .own = memory.values, .squares = memory.squares});
    reduced.push_back(memory);
  }
  auto subject = reduction.unit_.subject();
  subject.unit = name;
  subject.members = members;
  reduction.works_ = reduction.memory_.reduce(pieces, subject);
  reduction.reduced_ = std::move(reduced);
  for (const auto& memory : reduction.reduced_) memory.storage->guard();
  reduction.in_flight_ = true;
  reduction.unit_.count_reduction();
}

/// Reuses the memory of the last gradient if no tensor refers to it any more, because touching new pages costs more than the sum.
GradientMemory& GradientReduction::make_memory(const Unit::Group& group) {
  const auto number = unit_.number_of(group);
  memories_.resize(unit_.groups().size());
  auto& memory = memories_[number];
  if (!memory || memory.storage.use_count() > 1) {
    memory.storage = unit_.make_storage(Role::Gradient, number, group.chunk, group.dtype, group.own.device());
    memory.storage->allocate();
    memory.storage->explain(
        fmt::format("the gradients of unit '{}' are on their way to the sum over all ranks; operators wait for that by themselves, "
                    "raw pointers can be had when backward() has returned",
                    unit_.name()));
    memory.values = memory.storage->memory_view(group.dtype);
  }
  if (wants_squares_ && !memory.squares) memory.squares = std::make_shared<double>();
  if (memory.squares) *memory.squares = std::numeric_limits<double>::quiet_NaN();
  return memory;
}

void GradientReduction::finish() {
  if (!in_flight_) return;
  const auto works = std::exchange(works_, {});
  const auto reduced = std::exchange(reduced_, {});
  const auto& replicas = unit_.mesh().replicate();
  try {
    for (const auto& work : works) work.wait();
    for (const auto& memory : reduced) {
      if (replicas.size() == 1) continue;
      replicas.all_reduce(memory.values, {.op = Reduce::Mean}, {.unit = unit_.name(), .number = unit_.number()}).wait();
    }
  } catch (...) {
    // Autograd has the gradients already. NaN keeps unfinished values from being taken for gradients.
    for (const auto& memory : reduced) {
      memory.values.fill_(std::numeric_limits<double>::quiet_NaN());
      memory.storage->unguard();
    }
    in_flight_ = false;
    throw;
  }
  for (const auto& memory : reduced) {
    memory.storage->unguard();
    if (replicas.size() == 1 && memory.squares && !std::isnan(*memory.squares)) memory.storage->remember_squares(*memory.squares);
  }
  in_flight_ = false;  // last, because other threads read it without the lock
}

void GradientReduction::abandon() {
  works_.clear();
  for (const auto& memory : std::exchange(reduced_, {})) memory.storage->unguard();
  in_flight_ = false;
}

}  // namespace tessera
