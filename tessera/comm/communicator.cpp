#include "tessera/comm/communicator.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/control/group.h"

namespace tessera {
namespace {

/// The shards of a parameter hold different values on each rank, so all_reduce and broadcast would mix them.
void expect_not_sharded(const at::Tensor& tensor, std::string_view operation) {
  if (!tensor.defined() || !tensor.key_set().has(kPagingKey)) return;
  throw UsageError(
      "{} was given a sharded parameter, its gradient, or what was computed from them: other ranks have other values of it at the same "
      "places. Gradients of shards are means over all ranks already; tessera::to_local(tensor) is an ordinary copy, if you mean this",
      operation);
}

/// Autograd records no collective, so gradients of its inputs, or of values that it overwrites, would be wrong without an error.
void expect_no_graph(const at::Tensor& tensor, std::string_view operation) {
  if (!c10::GradMode::is_enabled() || !tensor.defined() || !tensor.requires_grad()) return;
  throw UsageError(
      "{} was given a tensor that requires a gradient, and autograd would not know of it; call tessera::nn::{}(tensor, world) of "
      "tessera/nn/collectives.h, which has a gradient, or if none is to flow, pass tensor.detach()",
      operation, operation);
}

void expect_no_graph(std::span<const Piece> pieces, std::string_view operation) {
  for (const auto& piece : pieces) {
    expect_no_graph(piece.own, operation);
    expect_no_graph(piece.whole, operation);
  }
}

/// Makes backward an error for graphs that have saved the tensor, which an operation is about to write.
void note_write(const at::Tensor& tensor) {
  if (tensor.defined() && !tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
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

Work Communicator::all_gather(std::span<const Piece> pieces, Subject subject, std::span<at::Tensor> operands) const {
  expect_no_graph(pieces, "all_gather");
  for (const auto& piece : pieces) note_write(piece.whole);
  return group_->all_gather(pieces, operands, call(subject));
}

Work Communicator::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, Subject subject) const {
  expect_no_graph(pieces, "reduce_scatter");
  for (const auto& piece : pieces) note_write(piece.own);
  return group_->reduce_scatter(pieces, reduction, call(subject));
}

Work Communicator::all_reduce(at::Tensor tensor, const Reduction& reduction, Subject subject) const {
  expect_not_sharded(tensor, "all_reduce");
  expect_no_graph(tensor, "all_reduce");
  note_write(tensor);
  return group_->all_reduce(tensor, reduction, call(subject));
}

Work Communicator::broadcast(at::Tensor tensor, int root, Subject subject) const {
  expect_not_sharded(tensor, "broadcast");
  expect_no_graph(tensor, "broadcast");
  note_write(tensor);
  return group_->broadcast(tensor, root, call(subject));
}

void Communicator::barrier(Subject subject) const {
  group_->barrier(call(subject)).wait();
}

Work Communicator::meet(Subject subject) const {
  return group_->meet(call(subject));
}

Extremes Communicator::extremes(uint64_t own, Subject subject) const {
  return group_->extremes(own, call(subject));
}

std::vector<std::string> Communicator::texts(const std::string& own, Subject subject) const {
  return group_->texts(own, call(subject));
}

Communicator Communicator::split(std::span<const int> colors) const {
  return Communicator(group_->split(colors, call()), limit_);
}

Communicator Communicator::part(std::span<const int> colors) const {
  const bool is_whole = std::ranges::adjacent_find(colors, std::not_equal_to<>()) == colors.end();
  if (is_whole && static_cast<int>(colors.size()) == size()) return *this;
  return Communicator(group_->part(colors, call()), limit_);
}

std::vector<Communicator> Communicator::parts() const {
  std::vector<Communicator> result;
  for (auto& part : group_->parts()) result.emplace_back(std::move(part), limit_);
  return result;
}

Communicator Communicator::duplicate() const {
  return split(std::vector<int>(static_cast<size_t>(size()), 0));
}

SharedAttempt Communicator::share(const AreaShape& shape, Subject subject) const {
  return group_->share(shape, call(subject));
}

at::Tensor Communicator::own_chunk(const at::Tensor& flat) const {
  if (flat.dim() != 1) throw UsageError("own_chunk takes flat tensors; this one has {} dimensions", flat.dim());
  const int64_t chunk = (flat.numel() + size() - 1) / size();
  std::vector<at::Tensor> parts;
  if (std::ssize(local_ranks()) > 1) {  // views of one tensor, so that an engine can take each rank's from there
    const auto missing = chunk * size() - flat.numel();
    const auto all = missing > 0 ? at::cat({flat, at::zeros({missing}, flat.options())}) : flat;
    for (const int rank : local_ranks()) parts.push_back(all.narrow(0, rank * chunk, chunk));
    return from_replicas(parts);
  }
  for (const int rank : local_ranks()) {
    const int64_t begin = std::min(rank * chunk, flat.numel());
    const int64_t end = std::min(begin + chunk, flat.numel());
    auto part = at::zeros({chunk}, flat.options());
    part.narrow(0, 0, end - begin).copy_(flat.narrow(0, begin, end - begin));
    parts.push_back(std::move(part));
  }
  return from_replicas(parts);
}

const GroupTraits& Communicator::traits() const {
  return group_->traits();
}

std::vector<at::Tensor> Communicator::replicas(const at::Tensor& tensor) const {
  return group_->transport().replicas(tensor);
}

at::Tensor Communicator::from_replicas(std::span<const at::Tensor> tensors) const {
  return group_->transport().from_replicas(tensors);
}

at::Tensor Communicator::to_local_ranks(const at::Tensor& rows) const {
  const auto ranks = std::ssize(local_ranks());
  if (!rows.defined() || rows.dim() == 0 || rows.size(0) % ranks != 0) {
    const auto what = rows.defined() ? fmt::format("a tensor with sizes [{}]", fmt::join(rows.sizes(), ", ")) : std::string("an undefined tensor");
    throw UsageError("{} has no equal parts for the {} ranks that this process stands for", what, ranks);
  }
  return from_replicas(rows.chunk(ranks)).to(traits().device);
}

void Communicator::enter(std::string_view phase, std::string_view unit) const {
  group_->enter(phase, unit);
}

void Communicator::step_done() const {
  group_->transport().step_done();
}

void Communicator::abort(std::string_view reason) const noexcept {
  group_->abort(reason);
}

uint64_t Communicator::next_number() const {
  return group_->next_number();
}

void Communicator::count(Operation operation, uint64_t bytes) const {
  group_->count(operation, bytes);
}

Traffic Communicator::traffic(Operation operation) const {
  return group_->traffic(operation);
}

void Communicator::reset_traffic() const {
  group_->reset_traffic();
}

}  // namespace tessera
