#include "tessera/optim/lamb.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/error.h"
#include "tessera/comm/groups/group_list.h"
#include "tessera/optim/update_range.h"
#include "tessera/shard/access/shard_place.h"

namespace tessera::optim {
namespace {

Squares prepare_in_parallel(const LambRule& rule, const UpdateRange& all) {
  if (auto* const simulation = Simulation::current()) {
    simulation->update(bytes_of(all));
    return {};
  }
  // The sum adds the parts in order, so it does not depend on which thread was first.
  std::vector<Squares> parts(static_cast<size_t>((all.count + kGrain - 1) / kGrain));
  at::parallel_for(0, std::ssize(parts), 1, [&](int64_t begin, int64_t end) {
    for (; begin < end; begin++) {
      const auto first = begin * kGrain;
      parts[static_cast<size_t>(begin)] = prepare(rule, part_of(all, first, std::min(kGrain, all.count - first)));
    }
  });
  Squares sum;
  for (const auto& part : parts) {
    sum.parameters += part.parameters;
    sum.update += part.update;
  }
  return sum;
}

at::Tensor sum_of_squares(const at::Tensor& tensor) {
  return tensor.to(at::promoteTypes(tensor.scalar_type(), at::kFloat)).pow(2).sum();
}

}  // namespace

Lamb::Lamb(std::vector<at::Tensor> parameters, LambOptions options)
    : Lamb(std::vector<ParameterGroup>{{.parameters = std::move(parameters)}}, options) {}

Lamb::Lamb(std::vector<ParameterGroup> groups, LambOptions options)
    : Optimizer(std::move(groups), {.lr = options.lr, .weight_decay = options.weight_decay}, {{.name = "exp_avg"}, {.name = "exp_avg_sq"}},
                fmt::format("Lamb with betas {} and {}, eps {}", options.beta1, options.beta2, options.eps)),
      options_(options) {
  expect_option("beta1", options.beta1, 1);
  expect_option("beta2", options.beta2, 1);
  expect_option("eps", options.eps);
}

void Lamb::apply(const Settings& settings, int64_t step, const Item& item) {
  // For a parameter with gaps in memory, `item` has a dense copy, which no longer exists when end_step() updates parameters.
  const bool has_gaps = item.members.size() == 1 && !item.members.front().parameter.is_non_overlapping_and_dense();
  if (has_gaps) throw UsageError("Lamb takes dense parameters only, but one has gaps in memory; make it contiguous");
  const auto place = place_of(item.members.front().parameter);
  if (place && place.listing() == Listing::Flat) {
    throw UsageError("Lamb scales each update to the norm of its parameter, so each needs a shard of its own; shard with tessera::Listing::ByName");
  }
  const auto group = place ? std::optional(find_or_add(groups_, place.mesh().shard())) : std::nullopt;
  if (!has_loops(item.parameter, item.gradient, item.state)) return apply_by_operators(settings, step, item, group);
  const auto n = static_cast<double>(step);
  const LambRule rule{.adam = {.common = {.factor = value_of(item.factor)},
                               .first = Decay(options_.beta1),
                               .second = Decay(options_.beta2),
                               .correction = static_cast<float>(std::sqrt(1 - std::pow(options_.beta2, n))),
                               .eps = static_cast<float>(options_.eps)},
                      .first_correction = static_cast<float>(1 - std::pow(options_.beta1, n)),
                      .decay = static_cast<float>(settings.weight_decay)};
  const auto all = update_range(item.parameter, item.gradient, item.state, item.cast_copy);
  for (const auto& member : item.members) {
    const auto range = item.members.size() == 1 ? all : part_of(all, member.offset, member.parameter.numel());
    pending_.push_back({.rule = rule, .lr = settings.lr, .range = range, .squares = prepare_in_parallel(rule, range), .group = group});
  }
}

void Lamb::apply_by_operators(const Settings& settings, int64_t step, const Item& item, std::optional<size_t> group) {
  const auto n = static_cast<double>(step);
  const auto &parameter = item.parameter, &first = item.state[0], &second = item.state[1];
  const auto gradient = scaled(item.gradient, item.factor);
  first.lerp_(gradient, 1 - options_.beta1);
  second.mul_(options_.beta2).addcmul_(gradient, gradient, 1 - options_.beta2);
  const auto root = second.sqrt().div_(std::sqrt(1 - std::pow(options_.beta2, n))).add_(options_.eps);
  const auto update = first.div(1 - std::pow(options_.beta1, n)).div_(root).add_(parameter, settings.weight_decay);
  for (const auto& member : item.members) {
    const bool is_all = item.members.size() == 1;
    const auto part = [&](const at::Tensor& all) { return is_all ? all : all.narrow(0, member.offset, member.parameter.numel()); };
    const auto own = part(parameter), own_update = part(update);
    pending_tensors_.push_back({.lr = settings.lr,
                                .parameter = own,
                                .update = own_update,
                                .squares = at::stack({sum_of_squares(own), sum_of_squares(own_update)}),
                                .group = group});
  }
}

void Lamb::begin_step() {
  pending_.clear();
  pending_tensors_.clear();
}

void Lamb::end_step_by_operators() {
  for (size_t group = 0; group < groups_.size(); group++) {
    std::vector<at::Tensor> squares;
    for (const auto& each : pending_tensors_) {
      if (each.group == group) squares.push_back(each.squares);
    }
    if (squares.empty()) continue;
    const auto sums = at::stack(squares);
    groups_[group].all_reduce(sums, {}, {.unit = "LAMB"}).wait();
    int64_t row = 0;
    for (auto& each : pending_tensors_) {
      if (each.group == group) each.squares = sums[row++];
    }
  }
  for (const auto& each : pending_tensors_) {
    const auto length = each.squares[0].sqrt(), update = each.squares[1].sqrt();
    const auto ratio = at::where(length.gt(0).logical_and(update.gt(0)), length / update, at::ones_like(length));
    each.parameter.sub_(each.update * ratio, each.lr);
  }
}

void Lamb::end_step() {
  end_step_by_operators();
  // Sums the squares over the shard group of each parameter, whose ranks have its parts. Nearly always there is only one such group.
  for (size_t group = 0; group < groups_.size(); group++) {
    std::vector<Pending*> all;
    for (auto& each : pending_) {
      if (each.group == group) all.push_back(&each);
    }
    if (all.empty()) continue;
    const auto sums = at::empty({std::ssize(all), 2}, at::kDouble);
    auto* values = sums.data_ptr<double>();
    for (const auto* each : all) {
      *values++ = each->squares.parameters;
      *values++ = each->squares.update;
    }
    groups_[group].all_reduce(sums, {}, {.unit = "LAMB"}).wait();
    values = sums.data_ptr<double>();
    for (auto* each : all) {
      each->squares.parameters = *values++;
      each->squares.update = *values++;
    }
  }
  if (Simulation::current() != nullptr) return;
  for (const auto& each : pending_) {
    const auto length = std::sqrt(each.squares.parameters), update = std::sqrt(each.squares.update);
    const auto step = static_cast<float>(each.lr * (length > 0 && update > 0 ? length / update : 1));
    at::parallel_for(0, each.range.count, kGrain,
                     [&](int64_t begin, int64_t end) { apply_update(each.rule, step, part_of(each.range, begin, end - begin)); });
  }
}

}  // namespace tessera::optim
