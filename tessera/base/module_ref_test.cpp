// A module may be given by itself, by a shared_ptr, and in its holder; an empty pointer or holder is refused.
#include "tessera/base/module_ref.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tests/testing/transports.h"

namespace tessera::testing::module_ref_test {
namespace {

using torch::nn::Linear, torch::nn::LinearImpl;

template <class From, class To>
constexpr bool kFits = std::is_convertible_v<From, To>;
static_assert(kFits<LinearImpl&, ModuleRef> && kFits<Linear, ModuleRef> && kFits<std::shared_ptr<LinearImpl>, ModuleRef>);
static_assert(kFits<const LinearImpl&, ConstModuleRef> && kFits<std::shared_ptr<const LinearImpl>, ConstModuleRef> &&
              kFits<ModuleRef, ConstModuleRef>);
static_assert(!kFits<const LinearImpl&, ModuleRef> && !kFits<std::shared_ptr<const LinearImpl>, ModuleRef> &&
              !kFits<ConstModuleRef, ModuleRef>);
static_assert(!kFits<at::Tensor, ModuleRef> && !kFits<std::shared_ptr<at::Tensor>, ModuleRef> && !kFits<LinearImpl*, ModuleRef>);

const torch::nn::Module* found(ConstModuleRef module) {
  return &*module;
}

TEST(ModuleRef, RefersToTheModule) {
  Linear linear(2, 3);
  const auto pointer = linear.ptr();
  for (const auto* each : {found(*linear), found(linear), found(pointer), found(torch::nn::AnyModule(linear)), found(ModuleRef(linear))}) {
    EXPECT_EQ(each, pointer.get());
  }
}

TEST(ModuleRef, RefusesWhatIsEmpty) {
  EXPECT_THAT(message_of<UsageError>([] { found(Linear(nullptr)); }), ::testing::HasSubstr("empty module holder"));
  EXPECT_THAT(message_of<UsageError>([] { found(std::shared_ptr<LinearImpl>()); }), ::testing::HasSubstr("empty shared_ptr"));
}

}  // namespace
}  // namespace tessera::testing::module_ref_test
