#include "tessera/shard/gradients/gradient_reduction.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/pinned_memory.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/recorded.h"
#include "tessera/shard/storage/storage_tag.h"

namespace tessera {
namespace {

/// The dtype in which gradients are sent. Where sums are computed in at least float32, a reduce_dtype that is wider than the gradients has
/// no effect: widening gradients before they are sent would change no bit of the sum. Engines of c10d add in the dtype that is sent, so
/// they use reduce_dtype as it is.
at::ScalarType wire_dtype(const Unit::Group& group, const MixedPrecision& precision, bool sums, SumOrder order) {
  const auto own = sums ? at::promoteTypes(group.unsharded_dtype, at::kFloat) : group.unsharded_dtype;
  const auto wanted = precision.reduce_dtype.value_or(own);
  const bool is_narrower = c10::elementSize(wanted) < c10::elementSize(own);
  return is_narrower || order == SumOrder::Any ? wanted : own;
}

/// The memory of a tensor. It keeps the tensor alive.
MemoryPtr memory_of(const at::Tensor& tensor) {
  return std::make_shared<at::DataPtr>(
      tensor.data_ptr(), new at::Tensor(tensor), [](void* kept) { delete static_cast<at::Tensor*>(kept); }, tensor.device());
}

bool detects_anomaly() {
  static const bool wanted = env_int("TESSERA_DETECT_ANOMALY", 0, 1).value_or(0) == 1;
  return wanted;
}

/// Logs that values of this rank's own gradient are not finite. After the reduction, nobody could tell from which rank they came.
void say_anomaly(const Unit& unit, const Unit::Parameter& parameter, const at::Tensor& gradient) {
  const auto nans = gradient.isnan().sum().item<int64_t>(), infs = gradient.isinf().sum().item<int64_t>();
  if (nans + infs == 0) return;
  const auto& world = unit.mesh().world();
  log(LogLevel::Error,
      fmt::format("rank {}: the gradient of '{}', unit '{}', has {} NaN and {} inf among {} values before it is averaged",
                  world.world_rank(world.local_ranks().front()), parameter.name, unit.name(), nans, infs, gradient.numel()));
}

}  // namespace

GradientReduction::Packing GradientReduction::begin(std::span<const Unit::Group* const> groups, bool sums) {
  finish();
  return {*this, groups, sums};
}

GradientReduction::Packing::Packing(GradientReduction& reduction, std::span<const Unit::Group* const> groups, bool sums)
    : reduction_(reduction),
      groups_(groups.begin(), groups.end()),
      keeps_(groups.size(), false),
      pass_{.share = {.sink = reduction.sink()}} {
  c10::SmallVector<GradientPlan, 2> plans;
  const auto& precision = reduction.unit_.options().mixed_precision;
  for (const auto* group : groups) {
    const auto order = reduction.unit_.mesh().shard().traits().sums;
    const auto dtype = wire_dtype(*group, precision, sums, order);
    widens_ = widens_ || dtype != wire_dtype(*group, precision, /*sums=*/false, order);
    plans.push_back({.numel = group->chunk * reduction.unit_.mesh().shard().size(), .dtype = dtype, .device = reduction.unit_.device()});
  }
  const bool has_replicas = reduction.unit_.mesh().replicate().size() > 1;
  if (reduction_.settings_.reduction_hook) {
    for (const auto& plan : plans) {
      buffers_.buffers.push_back(at::empty({plan.numel}, at::TensorOptions().dtype(plan.dtype).device(plan.device)));
    }
  } else {
    buffers_ = reduction.unit_.memory().gradients->buffers(plans);
    pass_.after.all_reduces = has_replicas && reduction_.settings_.all_reduce;
    pass_.after.is_part = has_replicas && !reduction_.settings_.all_reduce;
    if (reduction_.settings_.divide) pass_.after.op = Reduce::Sum;
    if (reduction_.settings_.divide && !pass_.after.is_part) pass_.after.divisor = reduction_.settings_.divide->post;
  }
  if (pass_.after.is_part) pass_.share = {};
}

void GradientReduction::Packing::pack(size_t group, std::span<const Unit::Parameter* const> parameters,
                                      std::span<const at::Tensor> gradients) {
  const auto& buffer = buffers_.buffers[group];
  c10::SmallVector<at::Tensor, 32> places, packed;
  int64_t end = 0;
  const auto fill_gap = [&](int64_t begin) {
    if (begin > end) buffer.narrow(0, end, begin - end).zero_();
  };
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto& gradient = gradients[i];
    if (!gradient.defined()) continue;
    const auto& parameter = *parameters[i];
    if (pass_.share.sink && parameter.shard.requires_grad() && pass_.share.sink->takes(parameter.shard)) {
      reduction_.expect_takeable(parameter);
      const bool listed_before = !pass_.share.shards.empty() && pass_.share.shards.back().is_same(parameter.shard);
      if (!listed_before) pass_.share.shards.push_back(parameter.shard);
    } else {
      keeps_[group] = true;
    }
    if (pass_.after.is_part) pass_.packed.insert(&parameter);
    fill_gap(parameter.span.offset);
    places.push_back(buffer.as_strided(parameter.sizes, parameter.strides, parameter.span.offset));
    const auto values = gradient.is_sparse() ? gradient.to_dense() : gradient;
    if (detects_anomaly()) say_anomaly(reduction_.unit_, parameter, values);
    const bool divides = reduction_.settings_.divide && reduction_.settings_.divide->pre != 1 && !reduction_.settings_.reduction_hook;
    packed.push_back(divides ? values / reduction_.settings_.divide->pre : values);
    if (divides && !buffer.is_cuda()) {  // so that only one quotient exists at a time
      reduction_.unit_.memory().gradients->pack(places, packed);
      places.clear();
      packed.clear();
    }
    end = parameter.span.offset + parameter.span.numel;
  }
  fill_gap(buffer.numel());
  reduction_.unit_.memory().gradients->pack(places, packed);
}

void GradientReduction::Packing::start(std::string_view name, uint64_t members) {
  auto& reduction = reduction_;
  auto& unit = reduction.unit_;
  if (pass_.share.shards.empty()) pass_.share = {};
  const auto& mesh = unit.mesh();
  const auto& hook = reduction_.settings_.reduction_hook;
  const auto& ranks = mesh.shard().local_ranks();
  // The sink can take the mean in parts, as it is computed, only if no shard gets the mean as its gradient, and if no operation on it
  // remains. (A process that represents several ranks has no part of its own in the buffers.)
  const bool in_parts =
      pass_.share.sink && pass_.after.is_plain() && !hook && ranks.size() == 1 && std::ranges::none_of(keeps_, std::identity());
  c10::SmallVector<Piece, 2> pieces;
  c10::SmallVector<GradientMemory, 2> reduced;
  for (size_t i = 0; i < groups_.size(); i++) {
    const auto& group = *groups_[i];
    const auto& whole = buffers_.buffers[i];
    pass_.share.groups.push_back(group.number);
    if (!pass_.share.sink || keeps_[i]) {
      const auto memory = reduction.make_memory(group, whole);
      pieces.push_back({.whole = whole, .own = memory.values, .squares = memory.squares});
      reduced.push_back(memory);
    } else {
      reduction.drop_memory(group);
      const auto own = in_parts ? whole.narrow(0, ranks.front() * group.chunk, group.chunk)
                                : at::empty({group.chunk}, at::TensorOptions(group.gradient_dtype).device(unit.device()));
      pieces.push_back({.whole = whole, .own = own});
      reduced.push_back({.storage = {}, .values = pieces.back().own, .arrival = {}, .group = group.number, .squares = {}});
    }
  }
  if (pass_.after.op == Reduce::Mean && !pass_.after.is_part && !hook && !pass_.share.sink && ranks.size() == 1) {
    const auto chunk = groups_.front()->chunk;
    reduction.watch_->equal_batches.note_own(unit, buffers_.buffers.front(), ranks.front() * chunk, chunk);
  }
  auto subject = reduction.versions_.subject();
  std::string described(name);
  if (const auto& divide = reduction_.settings_.divide) described += fmt::format(", divided by {} and {}", divide->pre, divide->post);
  if (widens_) described += ", with unreduced gradients of earlier passes";
  if (reduction.unsynced.forget_drops()) described += fmt::format(", after {} were dropped", kEarlierGradients);
  described += reduction.watch_->earlier.note_reduction(unit);
  if (pass_.share.sink) {
    subject.writer = pass_.share.sink->writer();
    described += ", with its step in backward";
    // This rank has finished with the unit. Other ranks know this when they see the gradients that it has packed.
    for (const auto& shard : pass_.share.shards) unit.outdate(shard);
    reduction.versions_.done_reading();
  }
  reduction.taken_ = pass_.share.sink != nullptr;
  auto& pass = reduction.pass_ = std::move(pass_);
  pass.described = std::move(described);
  subject.unit = pass.described;
  subject.members = members;
  if (const auto& beside = reduction.watch_->beside.words(); pass.after.all_reduces || !beside.empty()) {
    pass.writer = beside.empty() ? subject.writer : beside;  // only one of the texts, because a rank may not know the other
    subject.writer = pass.writer;
  }
  if (pass.after.all_reduces) pass.subject = subject;  // the replicas compare it in the all-reduce in finish_mean()
  if (hook) {
    mesh.world().barrier(subject);  // ranks that have used different parameters get an error here
    run_hook(hook, pieces);
  } else {
    unit.memory().gradients->note_evaluations(reduction.watch_->evaluations);
    TakeMean take;
    if (in_parts) take = [&reduction](const PartOfMean& mean) { reduction.give_to_sink(mean); };
    pass.works = unit.memory().gradients->reduce(pieces, subject, pass.after.op, std::move(take));
  }
  pass.reduced = std::move(reduced);
  for (const auto& memory : pass.reduced) {
    if (memory.storage) memory.storage->guard();
  }
  unit.flags().is_reducing = true;
  unit.counters().reductions++;
}

void GradientReduction::Packing::run_hook(const ReductionHook& hook, std::span<const Piece> pieces) const {
  const auto& unit = reduction_.unit_;
  for (const auto& piece : pieces) {
    if (piece.squares) *piece.squares = std::numeric_limits<double>::quiet_NaN();
    hook({.whole = piece.whole, .shard = piece.own, .mesh = unit.mesh(), .unit = unit.name()});
  }
}

/// Throws UsageError if the program expects to find the gradient of this parameter, which the sink is about to take, somewhere else.
void GradientReduction::expect_takeable(const Unit::Parameter& parameter) const {
  namespace ag = torch::autograd;
  const auto refuse = [&](std::string_view why) {
    throw UsageError("the optimizer of unit '{}' steps in backward, {}", unit_.name(), why);
  };
  if (taken_) {
    refuse(
        "and has already done so since its last step(): call step() after every backward pass. To accumulate gradients over several "
        "passes, call step_after_backward() first");
  }
  if (parameter.shard.grad().defined()) {
    refuse(
        fmt::format("but '{}' has a gradient from before, which that step would leave out; call step() and zero_grad() before "
                    "step_in_backward()",
                    parameter.name));
  }
  const auto accumulator = ag::impl::try_get_grad_accumulator(parameter.shard);
  const auto& hooks = ag::impl::get_autograd_meta(parameter.shard)->cpp_hooks_list_;  // removed hooks stay in the list as empty functions
  const bool hooked = ag::impl::post_acc_grad_hooks(parameter.shard) ||
                      (hooks && std::ranges::any_of(*hooks, [](const auto& hook) { return static_cast<bool>(hook); })) ||
                      (accumulator && (!accumulator->post_hooks().empty() || !accumulator->pre_hooks().empty()));
  if (hooked) {
    refuse(
        fmt::format("but the shard of '{}' has a hook, which would see no gradient; register it on the module's own parameter, or call "
                    "step_after_backward() first",
                    parameter.name));
  }
  if (asks_for_chosen_gradients()) {
    refuse(
        "but this pass was asked for the gradients of chosen tensors (autograd::grad, or backward with inputs), and shards keep none; "
        "call step_after_backward() first");
  }
}

/// Reuses the memory of the last gradient if no tensor refers to it any more, because touching new pages costs more than the sum. Memory on
/// a device is not reused here but freed: the device's allocator is quick, and other tensors need the memory meanwhile.
GradientMemory GradientReduction::make_memory(const Unit::Group& group, const at::Tensor& packed) {
  const auto number = group.number;
  memories_.resize(unit_.groups().size());
  auto& memory = memories_[number];
  if (!memory || memory.storage.use_count() > 1) {
    memory.storage = unit_.make_storage(Role::Gradient, number, group.chunk, group.gradient_dtype);
    if (const auto& offload = unit_.options().offload; offload.gradients == OffloadTo::Disk) {
      memory.storage->attach(std::make_shared<at::DataPtr>(
          allocate_on_disk(memory.storage->nbytes(), offload.disk, fmt::format("gradients of unit '{}'", unit_.name()))));
    } else if (unit_.is_offloaded()) {
      memory.storage->attach(std::make_shared<at::DataPtr>(allocate_pinned(memory.storage->nbytes(), unit_.device())));
    } else if (is_sum(group, packed)) {
      memory.storage->adopt(memory_of(packed));
    } else {
      memory.storage->allocate(unit_.name());
    }
    memory.storage->explain(
        fmt::format("the gradients of unit '{}' are still being reduced over the ranks; operators wait for that by themselves, "
                    "but ask for raw pointers only after backward() has returned",
                    unit_.name()));
    memory.values = memory.storage->memory_view(group.gradient_dtype);
    memory.group = number;
  }
  if (wants_squares_ && !memory.squares) memory.squares = std::make_shared<double>();
  if (memory.squares) *memory.squares = std::numeric_limits<double>::quiet_NaN();
  auto result = memory;
  if (unit_.is_offloaded()) {
    // The device keeps memory for the gradient only until the gradient has arrived on the host.
    result.arrival = std::exchange(result.values, at::empty({group.chunk}, result.values.options().device(unit_.device())));
  }
  return result;
}

/// Whether the gradient that a rank has packed is the sum over all ranks already.
bool GradientReduction::is_sum(const Unit::Group& group, const at::Tensor& packed) const {
  const auto& traits = unit_.mesh().shard().traits();
  return traits.size == 1 && !traits.traces && !packed.is_cpu() && packed.scalar_type() == group.gradient_dtype &&
         !settings_.reduction_hook;
}

void GradientReduction::drop_memory(const Unit::Group& group) {
  memories_.resize(unit_.groups().size());
  memories_[group.number] = {};
}

/// Gives the sink its share of the mean.
void GradientReduction::give_to_sink(const PartOfMean& mean) {
  const auto share = std::exchange(pass_.share, {});
  const Recorded step(unit_.mesh().world().record().get(), Activity::Optimizer, "step", unit_.name());
  share.sink->take(unit_.shared_from_this(), share.shards, [&](const at::Tensor& part, const at::Tensor& target) {
    const auto piece = std::ranges::find(share.groups, tag_of(part)->group) - share.groups.begin();
    mean(static_cast<size_t>(piece), part.storage_offset(), target);
  });
}

std::vector<at::Tensor> GradientReduction::results() const {
  std::vector<at::Tensor> all;
  for (const auto& memory : pass_.reduced) all.push_back(memory.values);
  return all;
}

void GradientReduction::lose(const std::vector<at::Tensor>& gradients, std::string why) {
  lost_.clear();
  for (const auto& gradient : gradients) lost_.emplace_back(gradient, gradient._version());
  lost_why_ = std::move(why);
}

void GradientReduction::expect_synced() {
  const auto is_here = [&](const auto& lost) {
    const auto& [gradient, version] = lost;
    return gradient._version() == version &&
           std::ranges::any_of(parameters_of(unit_), [&](const auto& parameter) { return parameter.shard.grad().is_same(gradient); });
  };
  if (std::ranges::any_of(lost_, is_here)) {
    throw UsageError(
        "the value that full_params was to write to the gradients of unit '{}' is lost, because {}; call zero_grad() and run "
        "the pass again",
        unit_.name(), lost_why_);
  }
  lost_.clear();
  if (unsynced.empty()) return;
  throw UsageError(
      "unit '{}' has gradients of backward passes that were not reduced over the ranks (no_sync, set_requires_gradient_sync or "
      "set_requires_all_reduce), which would be left out; let the last pass before a step reduce, or call "
      "tessera::sync_gradients(model)",
      unit_.name());
}

/// Turns a sum over this rank's shard group into the mean over all ranks.
void GradientReduction::finish_mean(const GradientMemory& memory) {
  if (pass_.after.is_part) return unsynced.add_part(memory.group, memory.values, pass_.packed);
  if (pass_.after.all_reduces) {
    unsynced.add_part_to(memory.group, memory.values);
    unit_.mesh().replicate().all_reduce(memory.values, {.op = pass_.after.op}, pass_.subject).wait();
  }
  if (pass_.after.divisor != 1) at::Tensor(memory.values).div_(pass_.after.divisor);
}

/// Waits until nothing is written to host memory any more.
void GradientReduction::forget_arriving() noexcept {
  try {
    arrived_.synchronize();
  } catch (const std::exception&) {  // the device has failed, and writes nothing any more
  }
  arriving_.clear();
}

void GradientReduction::finish() {
  finish_sum();
  if (arriving_.empty()) return;
  arrived_.synchronize();
  for (const auto& memory : std::exchange(arriving_, {})) memory.storage->unguard();
  unit_.flags().is_reducing = false;
}

void GradientReduction::finish_sum() {
  if (!unit_.flags().is_reducing || !arriving_.empty()) return;
  const Recorded wait(unit_.mesh().world().record().get(), Activity::Reduce, "reduce", unit_.name());
  const auto works = std::exchange(pass_.works, {});
  const auto reduced = std::exchange(pass_.reduced, {});
  try {
    for (const auto& work : works) work.wait();
    for (const auto& memory : reduced) finish_mean(memory);
    if (!reduced.empty()) watch_->equal_batches.note_mean(unit_, reduced.front().values);
    if (pass_.share.sink) {
      give_to_sink([&](size_t piece, int64_t begin, const at::Tensor& target) {
        at::Tensor(target).copy_(reduced[piece].values.narrow(0, begin, target.numel()));
      });
    }
    for (const auto& memory : reduced) {
      if (!memory.arrival.defined() || !gives_gradients()) continue;
      arrived_ = copy_to_pinned(memory.values, memory.arrival);
      arriving_.push_back(memory);
    }
  } catch (...) {
    // Autograd has the gradients already. NaN keeps unfinished values from being taken for gradients.
    forget_arriving();
    for (const auto& memory : reduced) {
      if (!memory.storage) continue;
      (memory.arrival.defined() ? memory.arrival : memory.values).fill_(std::numeric_limits<double>::quiet_NaN());
      memory.storage->unguard();
    }
    pass_.share = {};
    unit_.flags().is_reducing = false;
    throw;
  }
  for (const auto& memory : reduced) {
    if (!memory.storage) continue;
    if (arriving_.empty()) memory.storage->unguard();
    if (unit_.options().offload.gradients == OffloadTo::Disk) evict_pages(memory.values.const_data_ptr(), memory.values.nbytes());
    if (pass_.after.is_plain() && memory.squares && !std::isnan(*memory.squares)) memory.storage->remember_squares(*memory.squares);
    if (!memory.storage->device().is_cpu()) memories_[memory.group] = {};
  }
  if (arriving_.empty()) unit_.flags().is_reducing = false;  // last, because other threads read it without the lock
}

void GradientReduction::abandon() {
  pass_.works.clear();
  arrived_.synchronize();
  for (const auto& memory : std::exchange(arriving_, {})) memory.storage->unguard();
  for (const auto& memory : std::exchange(pass_.reduced, {})) {
    if (memory.storage) memory.storage->unguard();
  }
  pass_.share = {};
  taken_ = false;
  unsynced.clear();
  unit_.flags().is_reducing = false;
}

at::Tensor UnsyncedGradients::sum_of(const Unit::Parameter& parameter) const {
  if (in_parts_.contains(&parameter)) {
    throw UsageError(
        "the unsynced gradient of '{}' is a sum over its shard group (set_requires_all_reduce), of which each rank has only its part; "
        "let a backward pass all-reduce it, and then take tessera::full_grad(shard)",
        parameter.name);
  }
  const auto sum = sums_.find(&parameter);
  return sum != sums_.end() ? sum->second.clone() : at::Tensor();
}

void UnsyncedGradients::drop(const Unit::Parameter& parameter, size_t group) {
  dropped_ = true;
  sums_.erase(&parameter);
  if (in_parts_.erase(&parameter) == 0) return;
  if (const auto part = parts_.find(group); part != parts_.end()) parameter.in_chunk(part->second).zero_();
  if (in_parts_.empty()) parts_.clear();
}

void UnsyncedGradients::add(std::span<const Unit::Parameter* const> parameters, std::span<const at::Tensor> gradients) {
  for (size_t i = 0; i < parameters.size(); i++) {
    const auto gradient = gradients[i].defined() && gradients[i].is_sparse() ? gradients[i].to_dense() : gradients[i];
    if (!gradient.defined()) continue;
    auto& sum = sums_[parameters[i]];
    if (sum.defined()) {
      sum.add_(gradient);
    } else {
      // A copy, because autograd may have given the same tensor to other nodes.
      sum = at::empty_strided(parameters[i]->sizes, parameters[i]->strides,
                              gradient.options().dtype(at::promoteTypes(gradient.scalar_type(), at::kFloat)))
                .copy_(gradient);
    }
  }
}

void UnsyncedGradients::add_to(std::span<const Unit::Parameter* const> parameters, std::span<at::Tensor> gradients) {
  expected_ = false;
  for (const auto& [parameter, sum] : sums_) {
    if (std::ranges::find(parameters, parameter) != parameters.end()) continue;
    throw UsageError(
        "'{}' was frozen while its gradient waited for a reduction, so the gradient would be lost; call tessera::sync_gradients(model) "
        "before you freeze parameters, or drop the gradient by zero_grad() of a Tessera optimizer",
        parameter->name);
  }
  for (size_t i = 0; i < parameters.size(); i++) {
    auto& gradient = gradients[i];
    if (const auto known = sums_.find(parameters[i]); known != sums_.end()) {
      auto sum = std::move(known->second);
      if (gradient.defined()) sum.add_(gradient.is_sparse() ? gradient.to_dense() : gradient);
      gradient = std::move(sum);
      sums_.erase(known);
    }
    if (!gradient.defined() && in_parts_.contains(parameters[i])) gradient = zeros_like(*parameters[i], parts_.begin()->second.device());
  }
}

void UnsyncedGradients::add_part(size_t group, const at::Tensor& sum, const std::set<const Unit::Parameter*>& parameters) {
  auto& part = parts_[group];
  part = part.defined() ? part.add_(sum) : sum.to(at::promoteTypes(sum.scalar_type(), at::kFloat), /*non_blocking=*/false, /*copy=*/true);
  in_parts_.insert(parameters.begin(), parameters.end());
}

void UnsyncedGradients::add_part_to(size_t group, const at::Tensor& sum) {
  const auto known = parts_.find(group);
  if (known == parts_.end()) return;
  at::Tensor(sum).add_(known->second);
  parts_.erase(known);
  if (parts_.empty()) in_parts_.clear();
}

at::Tensor zeros_like(const Unit::Parameter& parameter, c10::Device device) {
  return at::zeros({}, at::TensorOptions(parameter.shard.scalar_type()).device(device)).expand(parameter.sizes);
}

}  // namespace tessera
