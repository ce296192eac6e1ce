// Functions of the Trainer across ranks, besides training: let one rank work before the others, gather rows of all ranks, and log numbers.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/simulation.h"
#include "tessera/train/trainer.h"

namespace tessera {
namespace {

/// Returns a name of the operation that includes the sizes, because ranks compare names before data moves.
std::string with_sizes(std::string_view operation, at::IntArrayRef sizes) {
  return fmt::format("{} of {{{}}}", operation, fmt::join(sizes, ", "));
}

/// The numbers of all ranks, a row for each.
at::Tensor numbers_of_ranks(const Communicator& world, at::IntArrayRef own, std::string_view operation) {
  const auto device = world.traits().device;
  if (world.traits().traces) return at::tensor(own, at::kLong).repeat({world.size(), 1});  // all ranks run this program with these numbers
  const auto mine = at::tensor(own, at::TensorOptions(device).dtype(at::kLong));
  const auto all = at::empty({world.size() * mine.numel()}, mine.options());
  world.all_gather(std::array{Piece{.whole = all, .own = mine}}, {.unit = operation}).wait();
  return all.cpu().view({world.size(), -1});
}

/// Returns how many rows of each rank only fill the batch: the last `repeats` rows of the batch of all ranks do.
at::Tensor repeats_of_ranks(int64_t rows, int64_t repeats, int ranks) {
  return (at::arange(ranks, at::kLong) + 1).mul_(rows).sub_(rows * ranks - repeats).clamp_(0, rows);
}

/// Throws UsageError unless there is a tensor of at least one dimension.
void expect_rows(const at::Tensor& tensor, std::string_view operation) {
  if (!tensor.defined()) throw UsageError("{} was given an undefined tensor", operation);
  if (tensor.dim() == 0) throw UsageError("{} was given a single number, which has no dimension to work along", operation);
}

/// Whether a tensor of this dtype can hold the number.
bool can_hold(at::ScalarType dtype, double number) {
  if (!at::isIntegralType(dtype, /*includeBool=*/true)) return true;
  return number == std::trunc(number) && at::full({}, number, at::kDouble).to(dtype).to(at::kDouble).item<double>() == number;
}

at::Tensor padded(const at::Tensor& tensor, int64_t length, const PadOptions& options) {
  const auto dim = options.dim < 0 ? options.dim + tensor.dim() : options.dim;
  const auto own = tensor.size(dim);
  if (own == length) return tensor;
  auto sizes = tensor.sizes().vec();
  sizes[static_cast<size_t>(dim)] = length;
  const auto result = at::full(sizes, options.pad_index, tensor.options());
  result.narrow(dim, options.pad_first ? length - own : 0, own).copy_(tensor);
  return result;
}

}  // namespace

int Trainer::local_process_index() const {
  const auto& topology = world_.topology();
  const int rank = world_.local_ranks().front();
  int before = 0;
  for (int other = 0; other < rank; other++) before += topology.host_of(other) == topology.host_of(rank) ? 1 : 0;
  return before;
}

void Trainer::set_seed(uint64_t seed, const SeedOptions& options) const {
  at::manual_seed(seed + (options.device_specific ? static_cast<uint64_t>(world_.local_ranks().front()) : 0));
  if (options.deterministic) at::globalContext().setDeterministicAlgorithms(true, /*warn_only=*/false);
}

void Trainer::call_first(bool first, const std::function<void()>& act) const {
  all_or_none(world_, {.unit = "main_process_first"}, "failed before the others", [&] {
    if (first) act();
  });
}

bool Trainer::check_trigger() {
  if (world_.extremes(triggered_ ? 1 : 0, {.unit = "check_trigger"}).most == 0) return false;
  triggered_ = false;
  return true;
}

at::Tensor Trainer::gather(const at::Tensor& tensor) const {
  if (!tensor.defined()) throw UsageError("gather was given an undefined tensor");
  const auto rows = tensor.dim() == 0 ? tensor.detach().reshape({1}) : tensor.detach().contiguous();
  auto sizes = rows.sizes().vec();
  sizes.front() *= world_.size();
  const auto all = at::empty(sizes, rows.options());
  const std::array piece = {Piece{.whole = all.view({-1}), .own = rows.view({-1})}};
  world_.all_gather(piece, {.unit = with_sizes("gather", rows.sizes())}).wait();
  return all;
}

std::vector<at::Tensor> Trainer::gather_rows(std::span<const at::Tensor> rows, const data::Samples& batch) const {
  constexpr int64_t kUnknown = -1;
  // Ranks with invalid rows take part in the exchange, too, so that all ranks get the error.
  const bool are_rows = std::ranges::all_of(rows, [&](const at::Tensor& each) {
    return each.defined() && rows.front().defined() && each.dim() > 0 && rows.front().dim() > 0 && each.size(0) == rows.front().size(0);
  });
  const auto own = are_rows ? rows.front().size(0) : kUnknown;
  const auto samples = batch.inputs.defined() ? batch.size() : kUnknown;
  const auto numbers = numbers_of_ranks(world_, {own, samples, batch.repeats}, "gather_for_metrics");
  if (world_.traits().traces && own != kUnknown) numbers.select(1, 2).copy_(repeats_of_ranks(own, batch.repeats, world_.size()));
  std::vector<int64_t> counted;
  const auto table = numbers.accessor<int64_t, 2>();
  for (int rank = 0; rank < world_.size(); rank++) {
    const auto has = table[rank][0], of = table[rank][1], repeats = table[rank][2];
    if (has == kUnknown) {
      throw UsageError(
          "gather_for_metrics takes rows, one for each sample, but rank {} has a single number, an undefined tensor, or tensors of "
          "different lengths",
          world_.world_rank(rank));
    }
    if (of != kUnknown && has != of) {
      throw UsageError(
          "gather_for_metrics takes a row for each sample, but rank {} has {} rows of a batch of {}, so it can't be told which ones only "
          "fill the batch; give it tensors whose dimension 0 is that of samples, or {{}} in place of the batch to get all rows",
          world_.world_rank(rank), has, of);
    }
    counted.push_back(std::max<int64_t>(has - repeats, 0));
  }
  const auto most = numbers.select(1, 0).max().item<int64_t>();
  std::vector<Piece> pieces;
  std::vector<at::Tensor> wholes;
  std::string name = "gather_for_metrics";
  for (const auto& each : rows) {
    const auto part = padded(each.detach(), most, {}).contiguous();
    auto sizes = part.sizes().vec();
    sizes.insert(sizes.begin(), world_.size());
    wholes.push_back(at::empty(sizes, part.options()));
    pieces.push_back({.whole = wholes.back().view({-1}), .own = part.view({-1})});
    name = with_sizes(name, part.sizes());
  }
  world_.all_gather(pieces, {.unit = name}).wait();
  std::vector<at::Tensor> result;
  for (const auto& whole : wholes) {
    std::vector<at::Tensor> parts;
    for (int rank = 0; rank < world_.size(); rank++) parts.push_back(whole[rank].narrow(0, 0, counted[static_cast<size_t>(rank)]));
    result.push_back(at::cat(parts));
  }
  return result;
}

at::Tensor Trainer::pad_across_processes(const at::Tensor& tensor, const PadOptions& options) const {
  expect_rows(tensor, "pad_across_processes");
  if (options.dim < -tensor.dim() || options.dim >= tensor.dim()) {
    throw UsageError("pad_across_processes was given dimension {} of a tensor with sizes [{}]", options.dim, joined(tensor.sizes()));
  }
  if (!can_hold(tensor.scalar_type(), options.pad_index)) {
    throw UsageError("pad_across_processes can't fill a tensor of {} with {}; choose a pad_index that it can hold",
                     c10::toString(tensor.scalar_type()), options.pad_index);
  }
  const auto numbers = numbers_of_ranks(world_, {tensor.size(options.dim)}, "pad_across_processes");
  return padded(tensor, numbers.max().item<int64_t>(), options);
}

at::Tensor Trainer::reduce(const at::Tensor& tensor, Reduce reduction) const {
  if (!tensor.defined()) throw UsageError("reduce was given an undefined tensor");
  const auto result = tensor.detach().clone(at::MemoryFormat::Contiguous);
  world_.all_reduce(result, {.op = reduction}, {.unit = with_sizes("reduce", result.sizes())}).wait();
  return result;
}

std::pair<int64_t, int64_t> Trainer::own_part(int64_t length) const {
  const auto begin = data::part_begin(length, world_.local_ranks().front(), world_.size());
  return {begin, data::part_begin(length, world_.local_ranks().back() + 1, world_.size()) - begin};
}

at::Tensor Trainer::split_between_processes(const at::Tensor& rows) const {
  expect_rows(rows, "split_between_processes");
  const auto [first, count] = own_part(rows.size(0));
  return rows.narrow(0, first, count);
}

void Trainer::log(const train::Values& values, std::optional<int64_t> step) {
  if (!is_main_process() || Simulation::current() != nullptr) return;  // a dry run has no numbers
  const auto number = step.value_or(steps());
  // A resumed run replaces the earlier run's reports: those of the steps that it repeats and, for values with a count of their own, those
  // from the first count that it logs.
  train::ReporterOptions from{.first_step = log_from_};
  if (std::exchange(resumed_, false) && number != steps()) {
    for (const auto& value : values) from.first_of[value.name] = number;
  }
  if (!log_) log_.emplace(reports_, from);
  log_->write(number, values);
  for (const auto& tracker : trackers_) tracker->write(number, values);
  log_from_ = std::max(log_from_, number + 1);
}

void Trainer::end_training() {
  log_.reset();
  trackers_.clear();
  wait_for_everyone();
}

}  // namespace tessera
