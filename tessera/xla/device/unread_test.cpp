// Every argument that decides a result is read by its lowering, or the call runs on the CPU.
#include "tessera/xla/device/unread.h"

#include <ATen/CPUGeneratorImpl.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/xla/device/kernels.h"
#include "tests/testing/xla_device.h"

namespace tessera::xla::unread_test {
namespace {

using c10::IValue;

/// A value of the argument's type that is not its default.
IValue given(const c10::Argument& argument) {
  const auto type = argument.real_type();
  const auto otherwise = argument.default_value().value_or(IValue());
  const auto inner = type->kind() == c10::TypeKind::OptionalType ? type->expect<c10::OptionalType>()->getElementType() : type;
  switch (inner->kind()) {
    case c10::TypeKind::TensorType:
      return at::ones({1});
    case c10::TypeKind::BoolType:
      return !(otherwise.isBool() && otherwise.toBool());
    case c10::TypeKind::FloatType:
      return 7.5;
    case c10::TypeKind::StringType:
      return std::string("other");
    case c10::TypeKind::GeneratorType:
      return at::make_generator<at::CPUGeneratorImpl>();
    case c10::TypeKind::ListType: {
      const auto element = inner->expect<c10::ListType>()->getElementType();
      if (element->kind() == c10::TypeKind::TensorType) return std::vector{at::ones({1})};
      if (element->kind() == c10::TypeKind::OptionalType) return c10::List<std::optional<at::Tensor>>({at::ones({1})});
      if (element->kind() == c10::TypeKind::BoolType) return c10::List<bool>({true});
      if (element->kind() == c10::TypeKind::FloatType) return c10::List<double>({7.5});
      return std::vector<int64_t>{7};
    }
    default:
      return int64_t{7};
  }
}

/// Whether the device takes a call whose lowering reads all arguments but one.
bool is_taken_without(const c10::FunctionSchema& schema, size_t unread, const IValue& value) {
  torch::jit::Stack stack;
  for (size_t i = 0; i < schema.arguments().size(); i++) stack.push_back(i == unread ? value : given(schema.arguments()[i]));
  const Signature signature(schema);
  Call call(signature, stack);
  for (size_t i = 0; i < call.arguments(); i++) {
    if (i != unread) (void)call[i];
  }
  try {
    call.give(std::span<const Value>());
    return true;
  } catch (const NotLowered&) {
    return false;
  }
}

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() && argument.alias_info()->isWrite();
}

TEST(Unread, ArgumentsOfNoLoweredOperatorAreLeftOutWithoutAReason) {
  (void)device_for_tests();
  ASSERT_GT(lowered_schemas().size(), 400U);
  size_t refused = 0;
  for (const auto& schema : lowered_schemas()) {
    for (size_t i = 0; i < schema.arguments().size() && !schema.arguments()[i].is_out(); i++) {
      const auto& argument = schema.arguments()[i];
      if (is_written(argument)) continue;
      const bool has_reason = may_be_unread(schema.name(), argument.name());
      EXPECT_EQ(is_taken_without(schema, i, given(argument)), has_reason) << schema << ": " << argument.name();
      refused += !has_reason;
      const auto otherwise = argument.default_value();
      EXPECT_TRUE(!otherwise || is_taken_without(schema, i, *otherwise)) << schema << ": " << argument.name();
    }
  }
  EXPECT_GT(refused, 500U);
}

TEST(Unread, ReasonsAreOfArgumentsThatAreThere) {
  (void)device_for_tests();
  for (const auto& [name, argument, why] : unread_arguments()) {
    const auto has = [&, &name = name, &argument = argument](const c10::FunctionSchema& schema) {
      auto plain = schema.name().substr(6);
      if (plain.ends_with('_')) plain.pop_back();
      if (name != "*" && plain != name) return false;
      return std::ranges::any_of(schema.arguments(), [&](const c10::Argument& each) { return each.name() == argument; });
    };
    EXPECT_TRUE(std::ranges::any_of(lowered_schemas(), has)) << name << ": " << argument;
    EXPECT_STRNE(why, "");
  }
}

TEST(Unread, GradientsOfAnEmbeddingAreScaledByHowOftenARowIsNamed) {
  for (const bool scaled : {false, true}) {
    const auto gradient = [&](at::Device where) {
      auto weight = torch::ones({5, 2}).to(where).requires_grad_();
      const auto words = torch::tensor({{1, 1, 2}, {1, 0, 4}}).to(where);
      torch::embedding(weight, words, /*padding_idx=*/4, scaled, /*sparse=*/false).sum().backward();
      return weight.grad().cpu();
    };
    EXPECT_TRUE(at::equal(gradient(device_for_tests()), gradient(at::kCPU))) << gradient(device_for_tests());
  }
}

}  // namespace
}  // namespace tessera::xla::unread_test
