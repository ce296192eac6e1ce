// The kind of every operator that libtorch registers, and what operators of each kind do when they are called.
#include "tessera/shard/dispatch/operators.h"

#include <ATen/ATen.h>
#include <ATen/record_function.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>

#include <map>
#include <set>

#include "tessera/base/error.h"
#include "tessera/shard/paging/locality.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::operators_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr c10::DispatchKeySet kCpu(c10::DispatchKey::CPU), kCuda(c10::DispatchKey::CUDA);

std::vector<c10::OperatorHandle> all_operators() {
  std::vector<c10::OperatorHandle> all;
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (auto handle = c10::Dispatcher::singleton().findSchema(name)) all.push_back(std::move(*handle));
  }
  return all;
}

std::string full_name(const c10::OperatorHandle& handle) {
  return toString(handle.operator_name());
}

OperatorKind kind_of(const char* name, const char* overload, c10::DispatchKeySet keys = kCpu) {
  return facts_of(c10::Dispatcher::singleton().findSchemaOrThrow(name, overload)).kind(keys);
}

/// Returns arguments for an operator: `tensor` for each tensor, and ordinary values for the rest. Returns none if it takes something else.
std::optional<Stack> arguments_for(const c10::FunctionSchema& schema, const at::Tensor& tensor) {
  Stack stack;
  for (const auto& argument : schema.arguments()) {
    const auto type = argument.type();
    if (argument.default_value() && !stack.empty()) {
      stack.push_back(*argument.default_value());
    } else if (type->isSubtypeOf(*c10::TensorType::get())) {
      stack.emplace_back(argument.is_out() ? tensor.clone() : tensor);  // few operators expect to overwrite what they read
    } else if (type->isSubtypeOf(*c10::ListType::ofTensors())) {
      stack.emplace_back(std::vector{tensor});
    } else if (stack.empty()) {
      return std::nullopt;
    } else if (type->kind() == c10::TypeKind::OptionalType) {
      stack.emplace_back();
    } else if (type->kind() == c10::TypeKind::FloatType) {
      stack.emplace_back(0.5);
    } else if (type->kind() == c10::TypeKind::NumberType || type->kind() == c10::TypeKind::IntType) {
      stack.emplace_back(1);
    } else if (type->kind() == c10::TypeKind::BoolType) {
      stack.emplace_back(false);
    } else {
      return std::nullopt;
    }
  }
  return stack.empty() ? std::nullopt : std::optional(std::move(stack));
}

struct Quiet : c10::WarningHandler {
  void process(const c10::Warning& /*warning*/) override {}
};

/// The results of the operator; none if it can't be called with such arguments.
std::optional<Stack> results_of(const c10::OperatorHandle& handle, const at::Tensor& tensor) {
  auto stack = arguments_for(handle.schema(), tensor);
  if (!stack) return std::nullopt;
  const auto arguments = *stack;  // libtorch 2.11 reads the result `out` of some operators after it has removed it from the stack
  Quiet quiet;  // operators that are no longer recommended say so
  const c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  try {
    handle.callBoxed(*stack);
    return stack;
  } catch (const std::exception&) {
    return std::nullopt;
  }
}

/// Whether the operator checks its arguments. Operators for libtorch itself (aten::_...), and those with many arguments, trust their
/// callers.
bool is_public(const c10::OperatorHandle& handle) {
  const auto& name = handle.schema().name();
  if (!name.starts_with("aten::") || name.starts_with("aten::_")) return false;
  return std::ranges::count_if(handle.schema().arguments(), [](const auto& argument) { return !argument.default_value(); }) <= 3;
}

TEST(OperatorExceptions, NameWhatExistsAndLacksNothing) {
  std::set<std::string> known;
  for (const auto& handle : all_operators()) {
    known.insert(handle.schema().name());
    known.insert(handle.schema().name() + "." + handle.schema().overload_name());
  }
  for (const auto& [fact, names, reason] : operator_exceptions()) {
    EXPECT_FALSE(reason.empty());
    for (const auto& name : names) EXPECT_TRUE(known.contains(std::string(name))) << name;
  }
}

TEST(OperatorKinds, AreThoseOfKnownOperators) {
  EXPECT_EQ(kind_of("aten::view", ""), OperatorKind::View);
  EXPECT_EQ(kind_of("aten::reshape", ""), OperatorKind::View);
  EXPECT_EQ(kind_of("aten::mul", "Tensor"), OperatorKind::Elementwise);
  EXPECT_EQ(kind_of("aten::copy_", ""), OperatorKind::Elementwise);
  EXPECT_EQ(kind_of("aten::linear", ""), OperatorKind::Composite);
  EXPECT_EQ(kind_of("aten::sum", ""), OperatorKind::Composite);
  EXPECT_EQ(kind_of("aten::mm", ""), OperatorKind::Other);
}

TEST(OperatorKinds, AreFoundForEveryDevice) {
  std::map<OperatorKind, int> cpu;
  for (const auto& handle : all_operators()) {
    const auto& op = facts_of(handle);
    const auto kind = op.kind(kCpu);
    cpu[kind]++;
    SCOPED_TRACE(full_name(handle));
    for (const auto keys : {kCpu, kCuda, c10::DispatchKeySet(c10::DispatchKey::XLA), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)}) {
      const auto own = keys.highestPriorityTypeId();
      if (op.kind(keys) == OperatorKind::Composite) {
        EXPECT_FALSE(handle.hasKernelForDispatchKey(own));
      }
      if (kind == OperatorKind::View || kind == OperatorKind::Elementwise) {
        EXPECT_EQ(op.kind(keys), kind);
      }
    }
    if (kind == OperatorKind::Composite) {
      EXPECT_TRUE(op.from_libtorch);
    }
    if (handle.hasTag(at::Tag::pointwise)) {
      EXPECT_NE(kind, OperatorKind::Composite);
    }
  }
  for (const auto kind : {OperatorKind::View, OperatorKind::Elementwise, OperatorKind::Composite, OperatorKind::Other}) {
    EXPECT_GT(cpu[kind], 50) << static_cast<int>(kind);  // libtorch still has the tags from which we derive kinds
  }
}

TEST(OperatorKinds, DoNotTakeKernelsOfOtherDevicesForComposites) {
  for (const auto* fused : {"aten::_fused_dropout", "aten::_cudnn_rnn", "aten::mkldnn_linear", "aten::batch_norm_stats"}) {
    EXPECT_EQ(kind_of(fused, "", kCpu), OperatorKind::Other) << fused;
    EXPECT_EQ(kind_of(fused, "", kCuda), OperatorKind::Other) << fused;
  }
}

TEST(OperatorKinds, AreWhatElementwiseOperatorsDo) {
  const auto whole = numbers({6}).abs().add(0.1).clamp(0.1, 0.9);
  int tried = 0;
  for (const auto& handle : all_operators()) {
    const auto& op = facts_of(handle);
    if (op.kind(kCpu) != OperatorKind::Elementwise || op.random || !is_public(handle)) continue;
    const auto all = results_of(handle, whole.clone()), part = results_of(handle, whole.slice(0, 2, 5).clone());
    if (!all || !part || all->empty() || !all->front().isTensor() || all->front().toTensor().dim() != 1) continue;
    tried++;
    const auto& results = all->front().toTensor();
    ASSERT_EQ(results.numel(), 6) << full_name(handle);
    EXPECT_TRUE(at::allclose(results.slice(0, 2, 5).to(at::kDouble), part->front().toTensor().to(at::kDouble), 1e-5, 1e-6, true))
        << full_name(handle);
  }
  EXPECT_GT(tried, 200);
}

TEST(OperatorKinds, AreWhatViewsDo) {
  int tried = 0;
  for (const auto& handle : all_operators()) {
    if (facts_of(handle).kind(kCpu) != OperatorKind::View || !is_public(handle)) continue;
    const auto x = numbers({2, 3});
    const auto results = results_of(handle, x);
    if (!results) continue;
    tried++;
    for_each_operand(*results, 0, [&](size_t, size_t, const at::Tensor& view) {
      EXPECT_TRUE(facts_of(handle).is_composite(kCpu) || view.is_alias_of(x)) << full_name(handle);
    });
  }
  EXPECT_GT(tried, 30);
}

thread_local int calls = 0;

TEST(OperatorKinds, AreWhatCompositesDo) {
  const auto note = [](const at::RecordFunction&) -> std::unique_ptr<at::ObserverContext> {
    calls++;
    return nullptr;
  };
  const auto count = at::addThreadLocalCallback(at::RecordFunctionCallback(note).scopes({at::RecordScope::FUNCTION}));
  int tried = 0;
  std::vector<std::string> alone;
  for (const auto& handle : all_operators()) {
    if (facts_of(handle).kind(kCpu) != OperatorKind::Composite || !is_public(handle)) continue;
    const auto x = numbers({2, 3});
    calls = 0;
    const auto results = results_of(handle, x);
    if (!results) continue;
    tried++;
    const auto is_new = [&](const c10::IValue& result) {
      return result.isTensor() && result.toTensor().defined() && !(result.toTensor().has_storage() && result.toTensor().is_alias_of(x));
    };
    if (std::ranges::any_of(*results, is_new) && calls < 2) alone.push_back(full_name(handle));
  }
  at::removeCallback(count);
  EXPECT_GT(tried, 200);
  EXPECT_THAT(alone, IsEmpty());
}

}  // namespace
}  // namespace tessera::testing::operators_test
