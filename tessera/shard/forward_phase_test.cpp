// Calls that have no meaning in the middle of a forward or backward pass.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/call.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::phases_test {
namespace {

using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

struct Sneaky : torch::nn::Module {
  torch::nn::Linear inner = register_module("inner", torch::nn::Linear(8, 8));
  std::function<void()> act = [] {};
  at::Tensor forward(const at::Tensor& x) {
    act();
    return inner(x);
  }
};

TEST(Phases, RefuseWhatHasNoMeaningInTheMiddleOfAPass) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<Sneaky>();
    fill_with_numbers(*model);
    fully_shard(model, {.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1});
    const std::vector<std::pair<std::string, std::function<void()>>> calls = {
        {"the norm of gradients", [&] { (void)clip_grad_norm(parameters(*model), 1); }},
        {"clip_grad_value", [&] { clip_grad_value(parameters(*model), 1); }},
        {"step()", [&] { optimizer.step(); }},
        {"no_sync", [&] { (void)no_sync(*model); }},
        {"set_gradient_divide_factors", [&] { set_gradient_divide_factors(*model, {.pre = 1, .post = 1}); }},
        {"full_params", [&] { (void)full_params(*model); }},
        {"sync_gradients", [&] { sync_gradients(*model); }},
        {"set_reshard_after_forward", [&] { set_reshard_after_forward(*model, true); }},
        {"set_reshard_after_backward", [&] { set_reshard_after_backward(*model, ReshardAfterBackward::Yes); }},
        {"skip_step", [&] { skip_step(*model); }},
    };
    for (const auto& [name, what] : calls) {
      model->act = what;
      EXPECT_THAT([&] { call(model, numbers({3, 8})); },
                  ThrowsMessage<UsageError>(HasSubstr(name + " was called during the forward of 'Sneaky'")));
      model->act = [] {};
      auto out = call(model, numbers({3, 8}));
      out.register_hook([&](const at::Tensor&) { what(); });
      EXPECT_THAT([&] { out.sum().backward(); }, ThrowsMessage<UsageError>(HasSubstr(name + " was called during backward")));
    }
    call(model, numbers({3, 8}, world.rank())).sum().backward();
    optimizer.step();
  });
}

}  // namespace
}  // namespace tessera::testing::phases_test
