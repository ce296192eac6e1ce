#include "tests/testing/tracing_transport.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/comm/control/group.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"
#include "tests/testing/silent_device.h"

namespace tessera::testing {
namespace {

/// Groups of replicas, all of the same size. A collective runs in each group.
using Groups = std::vector<std::vector<int>>;

GroupTraits traits_of(const Groups& groups) {
  const auto size = static_cast<int>(groups.front().size());
  std::vector<int> ranks(groups.front().size());
  std::iota(ranks.begin(), ranks.end(), 0);
  return {.name = "tracing",
          .size = size,
          .local_ranks = std::move(ranks),
          .device = silent_device(),
          .packing = Packing::BufferPerParameter,
          .traces = true};
}

class TracingTransport final : public Transport {
 public:
  TracingTransport(Groups groups, std::shared_ptr<Trace> trace)
      : Transport(traits_of(groups)), groups_(std::move(groups)), trace_(std::move(trace)) {}

  Moved run(const Request& request, const Launch& start) override {
    auto& step = record(request.operation, start.unit, request.pieces.size());
    for (auto& operand : request.operands) {
      operand = operand.clone();  // a real tracing transport returns the results of a barrier operation
      step.operands.push_back(
          {.sizes = operand.sizes().vec(), .in_its_place = decltype(Trace::Operand::in_its_place)(operand.getIntrusivePtr())});
    }
    for (const auto& piece : request.pieces) {
      for (const auto& group : groups_) move(request, piece, group);
    }
    return {};
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> /*part*/) override {
    record(Operation::Split, {}, 0);
    Groups parts;
    for (const auto& group : groups_) {
      std::map<int, std::vector<int>> by_color;
      for (size_t i = 0; i < group.size(); i++) by_color[colors[i]].push_back(group[i]);
      for (auto& [color, members] : by_color) parts.push_back(std::move(members));
    }
    const auto differs = [&](const auto& part) { return part.size() != parts.front().size(); };
    if (std::ranges::any_of(parts, differs)) throw UsageError("one program serves all groups of a split, so they need one size");
    return std::make_unique<TracingTransport>(std::move(parts), trace_);
  }

  /// Returns the values of all replicas, or of the first group's if there are several groups.
  std::vector<at::Tensor> replicas(const at::Tensor& tensor) override {
    const auto all = download(tensor);
    std::vector<at::Tensor> result;
    for (const int r : groups_.front()) result.push_back(all[static_cast<size_t>(r)]);
    return result;
  }

  at::Tensor from_replicas(std::span<const at::Tensor> tensors) override {
    std::vector<at::Tensor> values(kReplicas);
    for (const auto& group : groups_) {
      for (size_t i = 0; i < group.size(); i++) {
        const auto r = static_cast<size_t>(group[i]);
        values[r] = tensors[i].is_cpu() ? tensors[i] : replica(tensors[i], group[i]);
      }
    }
    return upload(values);
  }

  void step_done() override { trace_->steps_done++; }

 private:
  Trace::Step& record(Operation operation, std::string_view unit, size_t pieces) {
    return trace_->calls.emplace_back(Trace::Step{.operation = operation, .unit = std::string(unit), .pieces = pieces});
  }

  static void move(const Request& request, const Piece& piece, const std::vector<int>& group) {
    if (request.operation == Operation::AllGather) {
      const auto all = at::cat(on(group, piece.own));
      for (const int r : group) replica(piece.whole, r).copy_(all);
    } else if (request.operation == Operation::ReduceScatter) {
      const auto parts = reduced(on(group, piece.whole), request.reduction).chunk(static_cast<int64_t>(group.size()));
      for (size_t i = 0; i < group.size(); i++) replica(piece.own, group[i]).copy_(parts[i]);
    } else if (request.operation == Operation::AllReduce) {
      const auto result = reduced(on(group, piece.whole), request.reduction);
      for (const int r : group) replica(piece.whole, r).copy_(result);
    } else {
      for (const int r : group) replica(piece.whole, r).copy_(replica(piece.whole, group.at(static_cast<size_t>(request.root))));
    }
  }

  static std::vector<at::Tensor> on(const std::vector<int>& group, const at::Tensor& tensor) {
    std::vector<at::Tensor> values;
    for (const int r : group) values.push_back(replica(tensor, r));
    return values;
  }

  static at::Tensor reduced(std::vector<at::Tensor> values, const Reduction& reduction) {
    std::vector<ConstBytes> rows;
    for (auto& value : values) {
      value = value.to(*reduction.wire_dtype).contiguous();
      rows.push_back(bytes_of(value));
    }
    const auto dtype = values.front().scalar_type();
    const auto sum_dtype = at::isFloatingType(dtype) ? at::promoteTypes(dtype, at::kFloat) : dtype;
    const auto result = at::empty(values.front().sizes(), values.front().options().dtype(sum_dtype));
    Reducer(reduction).reduce(rows, result, Topology::one_host(static_cast<int>(rows.size())));
    return result;
  }

  const Groups groups_;
  const std::shared_ptr<Trace> trace_;
};

}  // namespace

std::vector<Trace::Step> Trace::of(Operation operation) const {
  std::vector<Step> result;
  std::ranges::copy_if(calls, std::back_inserter(result), [&](const Step& step) { return step.operation == operation; });
  return result;
}

TracingWorld tracing_world() {
  std::vector<int> all(kReplicas);
  std::iota(all.begin(), all.end(), 0);
  const auto trace = std::make_shared<Trace>();
  return {.world = Communicator(std::make_shared<Group>(std::make_unique<TracingTransport>(Groups{all}, trace))), .trace = trace};
}

}  // namespace tessera::testing
