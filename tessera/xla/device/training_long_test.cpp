// Each model with each optimizer in each dtype: the compilations take minutes.
#include "tests/testing/xla_training.h"

namespace tessera::xla {
namespace {

class AllTraining : public ::testing::TestWithParam<cases::Case> {};
INSTANTIATE_TEST_SUITE_P(All, AllTraining, ::testing::ValuesIn(cases::all_cases()), [](const auto& info) { return info.param.name; });
TEST_P(AllTraining, HasTheLossesOfTheCpu) { cases::expect_losses_of_the_cpu(GetParam()); }

}  // namespace
}  // namespace tessera::xla
