#include "tessera/comm/conformance.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <numeric>
#include <optional>

#include "tessera/base/error.h"

namespace tessera {
namespace {

// No elements, one, an odd number, and more than any transport moves at once.
constexpr std::array<int64_t, 4> kSizes = {0, 1, 13, 270'007};
constexpr int64_t kLargest = kSizes.back();
constexpr std::array kFloats = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16};
constexpr std::array kOthers = {at::kLong, at::kByte, at::kBool};

using OfRank = std::function<at::Tensor(int rank)>;

/// A tensor on the group's device that has value(rank) for each of this process's ranks.
at::Tensor given(const Communicator& world, const OfRank& value) {
  std::vector<at::Tensor> values;
  for (const int rank : world.local_ranks()) values.push_back(value(rank));
  return world.from_replicas(values).to(world.traits().device);
}

std::vector<at::Tensor> seen(const Communicator& world, const at::Tensor& tensor) {
  auto values = world.replicas(tensor);
  for (auto& value : values) value = value.cpu();
  return values;
}

at::Tensor filled(const Communicator& world, int64_t numel, int64_t number, at::ScalarType dtype) {
  return at::full({numel}, number, at::TensorOptions(world.traits().device).dtype(dtype));
}

/// The rank whose values `rank` sends: every simulated peer sends what this rank sends.
int sender(const Communicator& world, int rank) {
  return world.traits().simulated ? world.rank() : rank;
}

/// The input of rank `rank`: small integers, so that sums are exact in every dtype and order.
at::Tensor values(const Communicator& world, int rank, int64_t numel, at::ScalarType dtype) {
  const auto numbers = at::arange(numel, at::kInt).mul_(7).add_(sender(world, rank) * 3).remainder_(5);
  return dtype == at::kBool ? numbers.eq(1) : numbers.to(dtype);
}

at::Tensor values(const Communicator& world, int64_t numel, at::ScalarType dtype) {
  return given(world, [&](int rank) { return values(world, rank, numel, dtype); });
}

/// Compares the values of each rank of this process with the expected ones. Sums of a transport that adds in any order may differ by
/// rounding in the dtype in which they were sent.
void expect_equal(const Communicator& world, const at::Tensor& actual, const OfRank& expected, std::optional<at::ScalarType> sent = {}) {
  const bool exact = !sent || world.traits().sums == SumOrder::Defined || !at::isFloatingType(*sent);
  const double rounding = exact ? 0 : *sent == at::kBFloat16 ? 1e-2 : *sent == at::kHalf ? 2e-3 : 1e-6;
  const auto found = seen(world, actual);
  for (size_t i = 0; i < found.size(); i++) {
    const auto due = expected(world.local_ranks()[i]);
    if (found[i].sizes() != due.sizes() || found[i].scalar_type() != due.scalar_type())
      throw Error("the values have another shape or dtype");
    if (exact ? at::equal(found[i], due) : at::allclose(found[i], due, rounding, rounding)) continue;
    throw Error("{} of {} values are wrong{}", found[i].ne(due).sum().item<int64_t>(), due.numel(), exact ? "" : ", by more than rounding");
  }
}

/// The expected reduction of all ranks' values, in rank order and in dtype `sum`.
at::Tensor reduced(const Communicator& world, int64_t numel, at::ScalarType dtype, Reduce op, at::ScalarType sum) {
  auto result = values(world, 0, numel, dtype).to(sum);
  for (int r = 1; r < world.size(); r++) {
    const auto next = values(world, r, numel, dtype).to(sum);
    result = op == Reduce::Min ? at::minimum(result, next) : op == Reduce::Max ? at::maximum(result, next) : result + next;
  }
  if (op == Reduce::Mean) result = result / world.size();
  return result.to(dtype);
}

at::ScalarType default_sum(at::ScalarType dtype) {
  return dtype == at::kHalf || dtype == at::kBFloat16 ? at::kFloat : dtype;
}

template <class E>
void expect_error(const std::function<void()>& act, std::string_view words) {
  try {
    act();
  } catch (const E& error) {
    if (std::string_view(error.what()).find(words) != std::string_view::npos) return;
    throw Error("the error does not say '{}': {}", words, error.what());
  }
  throw Error("an error was due, but none came");
}

void check_all_gather(const Communicator& world, int64_t numel, at::ScalarType dtype) {
  const int size = world.size();
  std::vector<at::Tensor> parts;
  for (int r = 0; r < size; r++) parts.push_back(values(world, r, numel, dtype));
  const auto expected = at::cat(parts);
  // One piece has its `own` outside of `whole`, the other at this rank's place inside `whole`.
  const Piece apart{.whole = filled(world, size * numel, 0, dtype), .own = values(world, numel, dtype)};
  std::vector<Piece> pieces = {apart};
  if (world.local_ranks().size() == 1) {  // `own` can't lie at the places of several ranks
    Piece inside{.whole = filled(world, size * numel, 0, dtype), .own = {}};
    inside.own = inside.whole.narrow(0, world.local_ranks().front() * numel, numel);
    inside.own.copy_(apart.own);
    pieces.push_back(inside);
  }
  world.all_gather(pieces, {.unit = "conformance", .version = 3}).wait();
  for (const auto& piece : pieces) expect_equal(world, piece.whole, [&](int) { return expected; });
}

void check_reduce_scatter(const Communicator& world, int64_t numel, at::ScalarType dtype, const Reduction& reduction) {
  const auto whole = values(world, numel * world.size(), dtype);
  const auto before = seen(world, whole.clone());
  const Piece piece{.whole = whole, .own = filled(world, numel, 0, dtype)};
  world.reduce_scatter(std::array{piece}, reduction, {.unit = "conformance"}).wait();
  const auto sum = reduction.sum_dtype.value_or(default_sum(dtype));
  const auto all = reduced(world, numel * world.size(), dtype, reduction.op, sum);
  expect_equal(
      world, piece.own, [&](int rank) { return all.narrow(0, numel * rank, numel); }, reduction.wire_dtype.value_or(dtype));
  expect_equal(world, whole, [&](int rank) { return before[rank - world.local_ranks().front()]; });
}

void check_all_reduce(const Communicator& world, int64_t numel, at::ScalarType dtype, Reduce op) {
  const auto tensor = values(world, numel, dtype);
  world.all_reduce(tensor, {.op = op}).wait();
  const auto expected = reduced(world, numel, dtype, op, default_sum(dtype));
  expect_equal(
      world, tensor, [&](int) { return expected; }, dtype);
}

void check_broadcast(const Communicator& world, int64_t numel, at::ScalarType dtype) {
  const int root = world.size() - 1;
  const auto tensor = values(world, numel, dtype);
  world.broadcast(tensor, root).wait();
  expect_equal(world, tensor, [&](int) { return values(world, root, numel, dtype); });
}

void check_split(const Communicator& world) {
  std::vector<int> colors;
  for (int r = 0; r < world.size(); r++) colors.push_back(r % 2);
  const auto half = world.split(colors);
  const int first = world.local_ranks().front(), first_of_half = half.local_ranks().front();
  if (first_of_half != first / 2) throw Error("rank {} has number {} in the group of every second rank", first, first_of_half);
  const auto sum = given(world, [&](int rank) { return at::full({1}, int64_t{sender(world, rank)}, at::kLong); });
  half.all_reduce(sum).wait();
  expect_equal(world, sum, [&](int rank) {
    int64_t expected = 0;
    for (int r = rank % 2; r < world.size(); r += 2) expected += sender(world, r);
    return at::full({1}, expected, at::kLong);
  });
  // A split of a split, while all three groups are in use.
  std::iota(colors.begin(), colors.end(), 0);
  const auto alone = half.split(std::span(colors).first(static_cast<size_t>(half.size())));
  alone.barrier();
  half.barrier();
  world.barrier();
}

void check_order(const Communicator& world) {
  // Operations that are waited for in reverse order still give each tensor its own values.
  std::vector<at::Tensor> tensors;
  std::vector<Work> works;
  for (int64_t i = 0; i < 8; i++) {
    tensors.push_back(filled(world, 1000 + i, i + 1, at::kLong));
    works.push_back(world.all_reduce(tensors.back(), {}, {.unit = "in order", .version = static_cast<uint64_t>(i)}));
  }
  for (int64_t i = 7; i >= 0; i--) {
    works[i].wait();
    if (!works[i].done()) throw Error("an operation that was waited for is not done");
    expect_equal(world, tensors[i], [&](int) { return at::full({1000 + i}, (i + 1) * world.size(), at::kLong); });
  }
}

/// The last rank calls another operation than the other ranks. All ranks must get the same error, and be able to continue.
void check_disagreement(const Communicator& world) {
  const bool odd_one = world.rank() == world.size() - 1;
  const auto named = fmt::format("rank {} at operation", world.size() - 1);
  const auto ones = [&](int64_t numel, at::ScalarType dtype) { return filled(world, numel, 1, dtype); };
  const auto tensor = ones(odd_one ? 6 : 5, at::kFloat);
  expect_error<CommError>([&] { world.all_reduce(tensor).wait(); }, named);
  const auto other_type = ones(5, odd_one ? at::kDouble : at::kFloat);
  expect_error<CommError>([&] { world.broadcast(other_type).wait(); }, named);
  const Piece piece{.whole = ones(3 * world.size(), at::kFloat), .own = ones(3, at::kFloat)};
  const Subject subject{.unit = odd_one ? "layers.1" : "layers.0"};
  expect_error<CommError>([&] { world.all_gather(std::array{piece}, subject).wait(); }, "'layers.1'");
  expect_error<CommError>([&] { odd_one ? world.barrier() : world.broadcast(ones(1, at::kFloat)).wait(); }, named);
  world.barrier();
}

/// The last rank's arguments are invalid. All ranks must get the same error, and be able to continue.
void check_refusal(const Communicator& world) {
  const bool odd_one = world.local_ranks().back() == world.size() - 1;
  const auto zeros = [&](int64_t numel) { return filled(world, numel, 0, at::kFloat); };
  const Piece piece{.whole = zeros(3 * world.size() + (odd_one ? 1 : 0)), .own = zeros(3)};
  const auto named = world.traits().traces ? std::string("reduce_scatter of 'layers.0': piece 0: whole has")
                                           : fmt::format("rank {} can't take part in reduce_scatter of 'layers.0'", world.size() - 1);
  expect_error<UsageError>([&] { world.reduce_scatter(std::array{piece}, {}, {.unit = "layers.0"}).wait(); }, named);
  expect_error<UsageError>([&] { world.all_reduce(odd_one ? zeros(16).view({4, 4}).t()[0] : zeros(4)).wait(); }, "not contiguous");
  expect_error<UsageError>([&] { world.all_reduce(filled(world, 2, 1, at::kLong), {.op = Reduce::Mean}).wait(); }, "mean");
  expect_error<UsageError>([&] { world.broadcast(zeros(2), world.size()).wait(); }, "does not exist");
  expect_error<UsageError>([&] { (void)world.split(std::vector<int>(world.size() + 1, 0)); }, "colors");
  world.barrier();
}

}  // namespace

std::vector<ConformanceCheck> conformance_checks(const Communicator& world) {
  const bool simulated = world.traits().simulated, traces = world.traits().traces;
  std::vector<ConformanceCheck> checks;
  const auto add = [&](std::string_view operation, std::string what, std::function<void(const Communicator&)> run) {
    checks.push_back({.operation = std::string(operation), .what = std::move(what), .run = std::move(run)});
  };
  for (const int64_t numel : kSizes) {
    // Large buffers are moved in several parts, which does not depend on the dtype: one wide and one narrow dtype suffice.
    const auto each = [&](std::string_view operation, std::span<const at::ScalarType> dtypes, std::string_view more, auto check) {
      for (const auto dtype : dtypes) {
        if (numel == kLargest && dtype != at::kFloat && dtype != at::kBFloat16) continue;
        add(operation, fmt::format("{} x {}{}", numel, c10::toString(dtype), more), [=](const auto& c) { check(c, numel, dtype); });
      }
    };
    for (const auto& dtypes : {std::span<const at::ScalarType>(kFloats), std::span<const at::ScalarType>(kOthers)}) {
      each("all_gather", dtypes, "", check_all_gather);
      each("broadcast", dtypes, "", check_broadcast);
    }
    for (const auto op : {Reduce::Sum, Reduce::Mean, Reduce::Min, Reduce::Max}) {
      const Reduction reduction{.op = op};
      const auto more = fmt::format(", {}", name(op));
      if (op == Reduce::Sum || op == Reduce::Mean)
        each("reduce_scatter", kFloats, more, [=](const auto&... given) { check_reduce_scatter(given..., reduction); });
      if (numel == kLargest && op != Reduce::Mean) continue;
      if (simulated && numel * world.size() > 1000) continue;  // large simulated reductions only have placeholder values
      each("all_reduce", kFloats, more, [=](const auto&... given) { check_all_reduce(given..., op); });
    }
    const Reduction mixed{.op = Reduce::Mean, .wire_dtype = at::kBFloat16, .sum_dtype = at::kDouble};
    each("reduce_scatter", std::array{at::kFloat}, ", sent as bfloat16, added in double",
         [=](const auto&... given) { check_reduce_scatter(given..., mixed); });
  }
  add("barrier", "", [](const auto& c) { c.barrier(); });
  // A tracing engine has one program for all parts of a split, so the parts must have the same size.
  if (!traces || world.size() % 2 == 0) add("split", "every second rank, and one by one", check_split);
  if (!simulated) add("order", "eight operations at once", check_order);
  if (!simulated && world.size() > 1) {
    if (!traces) add("errors", "ranks that disagree", check_disagreement);
    add("errors", "a rank that can't take part", check_refusal);
  }
  return checks;
}

}  // namespace tessera
