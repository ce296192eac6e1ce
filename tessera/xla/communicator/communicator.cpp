#include "tessera/xla/communicator/communicator.h"

#include <algorithm>
#include <cmath>
#include <map>

#include "tessera/base/error.h"
#include "tessera/comm/engine.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/device/ties.h"
#include "tessera/xla/device/values.h"
#include "tessera/xla/device/views.h"
#include "tessera/xla/graph/arithmetic.h"

namespace tessera::xla {
namespace {

using hlo::ReplicaGroups;

GroupTraits traits_of(const ReplicaGroups& groups) {
  const auto size = static_cast<int>(groups.front().size());
  return {.name = "xla",
          .simulated = !runner().runs(),
          .size = size,
          .topology = Topology::one_host(size),
          .local_ranks = all_ranks(size),
          .world_ranks = groups.front(),
          .device = c10::Device(kXla, 0),
          .packing = Packing::BufferPerParameter,
          .sums = SumOrder::Any,
          .traces = true};
}

Combine combine_of(Reduce op) {
  return op == Reduce::Min ? Combine::Min : op == Reduce::Max ? Combine::Max : Combine::Add;
}

/// Returns the unsigned integer type of the same size. broadcast() adds in this type, because adding integer zeros keeps every bit.
at::ScalarType bits_of(at::ScalarType element) {
  const auto size = c10::elementSize(element);
  return size == 1 ? at::kByte : size == 2 ? at::kUInt16 : size == 4 ? at::kUInt32 : at::kUInt64;
}

/// Returns the type in which all_gather() sends elements: 16-bit integers for 16-bit floats, which compilers for CPUs would send as
/// float32.
at::ScalarType sent_as(at::ScalarType element) {
  return c10::elementSize(element) == 2 ? bits_of(element) : element;
}

/// Converts to the wire dtype before a reduction, because a collective adds in the type of its operand.
Value before_reduction(const at::Tensor& tensor, const Reduction& reduction) {
  return hlo::convert(read(tensor), *reduction.wire_dtype);
}

class XlaTransport final : public Transport {
 public:
  explicit XlaTransport(ReplicaGroups groups) : Transport(traits_of(groups)), groups_(std::move(groups)) {}

  Moved run(const Request& request, const Launch& /*start*/) override {
    const auto lock = lock_device();
    if (request.operation == Operation::AllGather) return {.bytes = all_gather(request.pieces, request.operands)};
    if (request.operation == Operation::ReduceScatter) return {.bytes = reduce_scatter(request.pieces, request.reduction)};
    const auto& tensor = request.pieces.front().whole;
    if (tensor.numel() == 0) return {};
    if (request.operation == Operation::Broadcast) return {.bytes = broadcast(tensor, request.root)};
    const auto& reduction = request.reduction;
    write(tensor, mean_of(hlo::all_reduce(before_reduction(tensor, reduction), combine_of(reduction.op), groups_), reduction));
    return {.bytes = to_others(static_cast<size_t>(tensor.numel()) * c10::elementSize(*reduction.wire_dtype))};
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> /*part*/) override {
    ReplicaGroups parts;
    for (const auto& group : groups_) {
      std::map<int, std::vector<int>> of_color;
      for (size_t i = 0; i < group.size(); i++) of_color[colors[i]].push_back(group[i]);
      for (auto& [color, members] : of_color) parts.push_back(std::move(members));
    }
    for (const auto& part : parts) {
      if (part.size() == parts.front().size()) continue;
      throw UsageError("XLA replicas can't be split into groups of {} and of {}: all groups run one program, so give them the same size",
                       parts.front().size(), part.size());
    }
    return std::make_unique<XlaTransport>(std::move(parts));
  }

  /// Returns the tensor's values on the replicas of this communicator or, after a split, on those of its first group.
  std::vector<at::Tensor> replicas(const at::Tensor& tensor) override {
    const auto all = xla::replicas(tensor);
    std::vector<at::Tensor> own;
    for (const int replica : groups_.front()) own.push_back(all[static_cast<size_t>(replica)]);
    return own;
  }

  at::Tensor from_replicas(std::span<const at::Tensor> tensors) override {
    if (std::ssize(tensors) != traits().size) {
      throw UsageError("from_replicas got {} tensors for {} ranks: give one for each rank", tensors.size(), traits().size);
    }
    std::vector<at::Tensor> of_replica(static_cast<size_t>(runner().replicas()));
    for (const auto& group : groups_) {
      for (size_t i = 0; i < group.size(); i++) of_replica[static_cast<size_t>(group[i])] = tensors[i];
    }
    return std::ranges::any_of(tensors, is_xla) ? chosen(of_replica) : xla::from_replicas(of_replica);
  }

  void step_done() override { step_boundary(); }

 private:
  uint64_t to_others(size_t bytes) const { return bytes * static_cast<uint64_t>(traits().size - 1); }

  Value mean_of(const Value& sum, const Reduction& reduction) const { return reduction.op == Reduce::Mean ? sum / traits().size : sum; }

  uint64_t all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands) const {
    std::vector<Value> own;
    for (const auto& piece : pieces) own.push_back(read(piece.own));
    put_behind_barrier(own, operands);  // else a compiler would gather all units at once, or keep a unit instead of gathering it again
    uint64_t sent = 0;
    for (size_t i = 0; i < pieces.size(); i++) {
      if (pieces[i].own.numel() == 0) continue;
      const auto element = own[i].element();
      const auto all = hlo::all_gather(hlo::bitcast(hlo::flat(own[i]), sent_as(element)), groups_);
      write(pieces[i].whole, hlo::reshape(hlo::bitcast(all, element), pieces[i].whole.sizes()));
      sent += to_others(pieces[i].own.nbytes());
    }
    return sent;
  }

  uint64_t reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction) const {
    std::vector<Value> reduced;
    std::vector<at::Tensor> own;
    uint64_t sent = 0;
    for (const auto& piece : pieces) {
      if (piece.squares) *piece.squares = std::nan("");  // unknown while the program is traced
      if (piece.own.numel() == 0) continue;
      const auto sum = hlo::reduce_scatter(hlo::flat(before_reduction(piece.whole, reduction)), combine_of(reduction.op), groups_);
      reduced.push_back(hlo::reshape(mean_of(sum, reduction), piece.own.sizes()));
      own.push_back(piece.own);
      sent += to_others(static_cast<size_t>(piece.own.numel()) * c10::elementSize(*reduction.wire_dtype));
    }
    // Without the barrier, a compiler may replace the reduce-scatter by an all-reduce and slice its result only where that is used, which
    // keeps whole gradients in memory until then.
    if (!reduced.empty()) reduced = hlo::barrier(reduced);
    for (size_t i = 0; i < own.size(); i++) write(own[i], reduced[i]);
    return sent;
  }

  uint64_t broadcast(const at::Tensor& tensor, int root) const {
    const auto value = read(tensor);
    const auto element = value.element();
    const auto bits = element == at::kBool ? hlo::convert(value, at::kByte) : hlo::bitcast(value, bits_of(element));
    const auto given = hlo::select(is_member(root), bits, 0);
    const auto all = hlo::all_reduce(given, Combine::Add, groups_);
    write(tensor, element == at::kBool ? hlo::convert(all, at::kBool) : hlo::bitcast(all, element));
    return to_others(tensor.nbytes());
  }

  static Value is_replica(int number) { return hlo::compare("EQ", hlo::replica_number(), hlo::constant(int64_t{number}, at::kUInt32)); }

  /// Returns a value that is true on the replicas whose rank in their group is `number`.
  Value is_member(int number) const {
    if (groups_.size() == 1) return is_replica(groups_.front()[static_cast<size_t>(number)]);
    Sizes marks(static_cast<size_t>(runner().replicas()), 0);
    for (const auto& group : groups_) marks[static_cast<size_t>(group[static_cast<size_t>(number)])] = 1;
    return hlo::convert(own_of(marks), at::kBool);
  }

  /// Returns a value that is numbers[r] on replica r. Evenly spaced numbers are computed from the replica's number, so that the program's
  /// text does not grow with their count.
  static Value own_of(const Sizes& numbers) {
    const auto own = hlo::convert(hlo::replica_number(), at::kLong);
    const auto step = numbers.size() > 1 ? numbers[1] - numbers[0] : 0;
    bool is_even = true;
    for (size_t i = 1; i < numbers.size(); i++) is_even &= numbers[i] - numbers[i - 1] == step;
    if (is_even) return own * hlo::constant(step, at::kLong) + hlo::constant(numbers[0], at::kLong);
    return hlo::reshape(hlo::dynamic_slice(hlo::constants(numbers, at::kLong), std::span(&own, 1), {1}), {});
  }

  static bool are_parts_of_one(const std::vector<at::Tensor>& tensors) {
    const auto& first = tensors.front();
    return is_xla(first) && first.is_contiguous() && first.numel() > 0 && cell_of(first).value &&
           std::ranges::all_of(tensors, [&](const at::Tensor& tensor) {
             return is_xla(tensor) && tensor.storage().is_alias_of(first.storage()) && tensor.scalar_type() == first.scalar_type() &&
                    tensor.sizes() == first.sizes() && tensor.strides() == first.strides() && !tensor.is_neg();
           });
  }

  /// Returns a tensor whose value on replica r is the value of of_replica[r] there.
  static at::Tensor chosen(const std::vector<at::Tensor>& of_replica) {
    const auto lock = lock_device();
    if (are_parts_of_one(of_replica)) {
      const auto& first = of_replica.front();
      Sizes begins;
      for (const auto& part : of_replica) begins.push_back(part.storage_offset());
      const auto begin = own_of(begins);
      const auto all = hlo::flat(in_type(cell_of(first).value, first.scalar_type()));
      return new_tensor(hlo::reshape(hlo::dynamic_slice(all, std::span(&begin, 1), {first.numel()}), first.sizes()));
    }
    const auto on_device = [](const at::Tensor& tensor) { return read(is_xla(tensor) ? tensor : xla::from_replicas({tensor})); };
    auto value = on_device(of_replica.front());
    for (size_t r = 1; r < of_replica.size(); r++) value = hlo::select(is_replica(static_cast<int>(r)), on_device(of_replica[r]), value);
    return new_tensor(value);
  }

  const ReplicaGroups groups_;
};

}  // namespace

Communicator replica_world() {
  return world_over({.link = nullptr, .transport = std::make_unique<XlaTransport>(ReplicaGroups{all_ranks(runner().replicas())})}, {});
}

}  // namespace tessera::xla
