#include "tessera/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/control/fill_envelope.h"
#include "tessera/comm/control/group.h"
#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

/// The shards of a parameter hold different values on each rank, so all_reduce and broadcast would mix them.
void expect_not_sharded(const at::Tensor& tensor, std::string_view operation) {
  if (!tensor.defined() || !tensor.key_set().has(kPagingKey)) return;
  throw UsageError(
      "{} was given a sharded parameter, its gradient, or a value computed from them: each rank has another part of it, so the values do not "
      "correspond. Gradients of shards are means over all ranks already; to combine the parts anyway, pass tessera::to_local(tensor), a copy",
      operation);
}

/// Autograd records no collective, so gradients of its inputs, or of values that it overwrites, would be wrong without an error.
void expect_no_graph(const at::Tensor& tensor, std::string_view operation) {
  if (!c10::GradMode::is_enabled() || !tensor.defined() || !tensor.requires_grad()) return;
  throw UsageError(
      "{} was given a tensor that requires a gradient, but has no backward; call tessera::nn::{}(tensor, world) of "
      "tessera/nn/collectives.h, which autograd differentiates, or pass tensor.detach() if no gradient is to flow",
      operation, operation);
}

/// Makes backward an error for graphs that have saved the tensor, which an operation is about to write.
void note_write(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
}

/// Returns the number of the new group that the ranks with this color form, when operation `sequence` splits the group with the number
/// `whole`.
uint64_t number_of_part(uint64_t whole, uint64_t sequence, int color) {
  constexpr uint64_t kMixer = 0x9e3779b97f4a7c15;
  return ((whole ^ (sequence + 1)) * kMixer ^ static_cast<uint64_t>(color + 1)) * kMixer;
}

/// The body of a barrier: nothing is left to do once all ranks have agreed.
Moved nothing(const Launch& /*start*/) {
  return {};
}

}  // namespace

Communicator::Communicator(std::shared_ptr<Group> group, std::chrono::milliseconds limit) : group_(std::move(group)), limit_(limit) {
  if (limit_ <= std::chrono::milliseconds::zero()) {
    throw UsageError("a time limit of {} ms leaves no time for any operation; give a positive one", limit_.count());
  }
}

int Communicator::rank() const {
  const auto& ranks = local_ranks();
  if (ranks.size() != 1) {
    throw UsageError("this process stands for all {} ranks of '{}'; ask for local_ranks()", ranks.size(), traits().name);
  }
  return ranks.front();
}

Work Communicator::run(Request request, const Subject& subject) const {
  for (const auto& [whole, own, squares] : request.pieces) {
    if (!request.has_parts()) expect_not_sharded(own, name(request.operation));
    expect_no_graph(own, name(request.operation));
    expect_no_graph(whole, name(request.operation));
  }
  for (const auto& piece : request.pieces) note_write(request.operation == Operation::AllGather ? piece.whole : piece.own);
  if (group_->link_) request.operands = {};
  const auto envelope = group_->describe(request.operation, subject, [&](Envelope& own) { describe(own, request, traits()); });
  return group_->start(envelope, limit_, [&transport = *group_->transport_, request = std::move(request)](const Launch& start) {
    return transport.run(request, start);
  });
}

Work Communicator::all_gather(std::span<const Piece> pieces, Subject subject, std::span<at::Tensor> operands) const {
  return run({.operation = Operation::AllGather, .pieces = {pieces.begin(), pieces.end()}, .operands = operands}, subject);
}

Work Communicator::all_gather_on_host(std::span<const Piece> pieces, const Subject& subject) const {
  if (traits().levels == 1) throw UsageError("only groups over two levels gather to memory that the ranks of a host share");
  return run({.operation = Operation::AllGather, .pieces = {pieces.begin(), pieces.end()}, .whole_of = Among::Host}, subject);
}

Work Communicator::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, Subject subject) const {
  return run({.operation = Operation::ReduceScatter, .pieces = {pieces.begin(), pieces.end()}, .reduction = reduction}, subject);
}

Work Communicator::all_reduce(at::Tensor tensor, const Reduction& reduction, Subject subject) const {
  return run({.operation = Operation::AllReduce, .pieces = {{.whole = tensor, .own = tensor}}, .reduction = reduction}, subject);
}

Work Communicator::broadcast(at::Tensor tensor, int root, Subject subject) const {
  return run({.operation = Operation::Broadcast, .pieces = {{.whole = tensor, .own = tensor}}, .root = root}, subject);
}

void Communicator::barrier(Subject subject) const {
  group_->start(group_->describe(Operation::Barrier, subject), limit_, nothing).wait();
}

Work Communicator::meet(Subject subject) const {
  const auto envelope = group_->describe(Operation::Barrier, subject);
  if (!group_->link_) return group_->run_here(envelope, nothing);
  group_->note_caller();
  group_->meetings_++;
  return group_->queue_.run([&group = *group_, envelope, limit = limit_] {
    const auto end = c10::make_scope_exit([&] { group.meetings_--; });
    for (;;) {
      try {
        return group.run(envelope, {}, limit, nothing);
      } catch (const DisagreementError&) {  // another rank was in another operation, which has failed with this error, too
      } catch (const UsageError&) {         // another rank could not take part in its operation
      }
    }
  });
}

Extremes Communicator::extremes(uint64_t own, Subject subject) const {
  auto found = Extremes::of(own);
  const auto take = [&](const Launch&) {
    if (group_->link_) found = group_->known_;
    return Moved();
  };
  group_->start(group_->describe(Operation::Compare, subject), limit_, take, own).wait();
  return found;
}

std::vector<std::string> Communicator::texts(const std::string& own, Subject subject) const {
  std::vector<std::string> found(size(), own);
  const auto gather = [&](const Launch& start) {
    if (group_->link_) found = all_gather_texts(*group_->link_, own, start.end);
    return Moved();
  };
  group_->start(group_->describe(Operation::Texts, subject), limit_, gather).wait();
  return found;
}

Communicator Communicator::split(std::span<const int> colors) const {
  const auto envelope = group_->describe(Operation::Split, {}, [&](Envelope& own) {
    for (const int color : colors) own.mix_into_layout(color);
    if (std::ssize(colors) != size()) throw UsageError("{} colors for {} ranks; give one for each", colors.size(), size());
  });
  std::shared_ptr<Link> link;
  std::unique_ptr<Transport> transport;
  uint64_t number = 0;
  const auto make = [&](const Launch& start) {
    if (group_->link_) {
      const int rank = group_->link_->rank();
      number = number_of_part(group_->number_, group_->now_.sequence, colors[rank]);
      link = group_->link_->split(members_of(colors, rank), start.end);
    }
    transport = group_->transport_->split(colors, link);
    return Moved();
  };
  group_->start(envelope, limit_, make).wait();
  return Communicator(std::make_shared<Group>(std::move(transport), std::move(link), group_->family_, number), limit_);
}

Communicator Communicator::part(std::span<const int> colors) const {
  const bool is_whole = std::ranges::adjacent_find(colors, std::not_equal_to<>()) == colors.end();
  if (is_whole && std::ssize(colors) == size()) return *this;
  std::vector<int> division;
  for (const int color : colors) division.push_back(static_cast<int>(std::ranges::find(colors, color) - colors.begin()));
  auto& known = group_->parts_;
  {
    const std::lock_guard lock(group_->mutex_);
    if (const auto found = known.find(division); found != known.end()) return Communicator(found->second, limit_);
  }
  auto made = split(colors);
  const std::lock_guard lock(group_->mutex_);
  return Communicator(known.emplace(std::move(division), std::move(made.group_)).first->second, limit_);
}

std::vector<Communicator> Communicator::parts() const {
  std::vector<Communicator> result;
  const std::lock_guard lock(group_->mutex_);
  for (const auto& [division, part] : group_->parts_) result.emplace_back(part, limit_);
  return result;
}

Communicator Communicator::duplicate() const {
  return split(std::vector<int>(size(), 0));
}

SharedAttempt Communicator::share(const AreaShape& shape, Subject subject) const {
  return group_->share(shape, subject, limit_);
}

at::Tensor Communicator::own_chunk(const at::Tensor& flat) const {
  if (flat.dim() != 1) throw UsageError("own_chunk takes flat tensors, but this one has {} dimensions; pass tensor.flatten()", flat.dim());
  const int64_t chunk = (flat.numel() + size() - 1) / size();
  std::vector<at::Tensor> parts;
  if (std::ssize(local_ranks()) > 1) {  // views of one tensor, so that a tracing engine can take each rank's part from it
    const auto missing = chunk * size() - flat.numel();
    const auto all = missing > 0 ? at::cat({flat, at::zeros({missing}, flat.options())}) : flat;
    for (const int rank : local_ranks()) parts.push_back(all.narrow(0, rank * chunk, chunk));
    return from_replicas(parts);
  }
  const int64_t begin = std::min(rank() * chunk, flat.numel());
  const int64_t end = std::min(begin + chunk, flat.numel());
  parts = {at::zeros({chunk}, flat.options())};
  parts.front().narrow(0, 0, end - begin).copy_(flat.narrow(0, begin, end - begin));
  return from_replicas(parts);
}

const GroupTraits& Communicator::traits() const {
  return group_->traits();
}

std::vector<at::Tensor> Communicator::replicas(const at::Tensor& tensor) const {
  return group_->transport_->replicas(tensor);
}

at::Tensor Communicator::from_replicas(std::span<const at::Tensor> tensors) const {
  return group_->transport_->from_replicas(tensors);
}

at::Tensor Communicator::to_local_ranks(const at::Tensor& rows) const {
  const auto ranks = std::ssize(local_ranks());
  if (!rows.defined() || rows.dim() == 0 || rows.size(0) % ranks != 0) {
    const auto what =
        rows.defined() ? fmt::format("a tensor with sizes [{}]", fmt::join(rows.sizes(), ", ")) : std::string("an undefined tensor");
    throw UsageError("{} can't be split evenly among the {} ranks that this process stands for", what, ranks);
  }
  return from_replicas(rows.chunk(ranks)).to(traits().device);
}

void Communicator::enter(std::string_view phase, std::string_view unit) const {
  record()->enter(phase, unit);
  if (auto* const simulation = Simulation::current()) simulation->enter(phase, unit);
}

const std::shared_ptr<Record>& Communicator::record() const {
  return group_->family_->record();
}

void Communicator::step_done() const {
  group_->transport_->step_done();
}

void Communicator::abort(std::string_view reason) const noexcept try {
  if (!group_->link_) return;  // no other rank waits
  group_->family_->abort(fmt::format("rank {}: {}", group_->world_rank(), reason), group_->world_rank());
} catch (const std::exception&) {  // out of memory: the other ranks wait until their time limit
}

uint64_t Communicator::next_number() const {
  return ++group_->last_number_;
}

void Communicator::count(Operation operation, uint64_t bytes) const {
  group_->count(operation, {.bytes = bytes});
}

Traffic Communicator::traffic(Operation operation) const {
  const auto& counter = group_->counters_[static_cast<size_t>(operation)];
  return {.calls = counter.calls, .bytes = counter.bytes, .across = counter.across};
}

void Communicator::reset_traffic() const {
  for (auto& counter : group_->counters_) counter.calls = counter.bytes = counter.across = 0;
}

}  // namespace tessera
