// Every function about a module takes a holder as it takes the module, and a shared_ptr to it.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/optim/sgd.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/rebind.h"
#include "tessera/shard/recover.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/report.h"
#include "tessera/shard/shard_metadata.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unsharding.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"

namespace tessera::testing::holders_test {
namespace {

/// Calls all of these functions on a sharded net, and returns the results as a text.
template <class NetArgument>
std::string used(const Communicator& world, NetArgument& net, Net holder) {
  torch::optim::SGD optimizer(holder->parameters(), 0.1);
  materialize(net);
  fully_shard(net, {.mesh = world}, wrap_classes({"Linear"}));
  rebind(optimizer, net);
  {
    const auto guard = no_sync(net);
    holder(input()).sum().backward();
  }
  set_requires_gradient_sync(net, Required::Yes);
  set_requires_all_reduce(net, Required::Yes);
  sync_gradients(net);
  set_gradient_divide_factors(net, default_divide_factors(world.size()));
  set_reshard_after_forward(net, true);
  set_reshard_after_backward(net, ReshardAfterBackward::Yes);
  unshard(net).wait();
  reshard(net);
  set_modules_to_forward_prefetch(net, {});
  set_requires_grad(net, Training::Trained);
  sync_buffers(net, world);
  skip_step(net);
  recover(net);
  const auto sum = [&] {
    const auto guard = full_params(net);
    return holder->a->weight.sum().template item<float>();
  }();
  auto text = std::to_string(sum) + " " + std::to_string(full_state(net).size()) + " " +
              std::to_string(full_tensor(net, "b.bias").numel()) + " " + std::to_string(parameters(net).size()) + " " +
              std::to_string(named_parameters(net).size()) + " " + std::to_string(parameters_of_modules(net, "b").size()) + " " +
              std::to_string(counters(net).reductions) + "\n" + describe(net);
  (void)shard_metadata(net, world);
  reset_counters(net);
  return text + std::to_string(counters(net).reductions);
}

TEST(Holders, AreTakenAsModulesAre) {
  with_ranks(2, [](const Communicator& world) {
    auto first = seeded_net(), second = seeded_net(), third = seeded_net();
    const auto expected = used<torch::nn::Module>(world, *first, first);
    EXPECT_EQ(used(world, second, second), expected);
    auto pointer = third.ptr();
    EXPECT_EQ(used(world, pointer, third), expected);
  });
}

}  // namespace
}  // namespace tessera::testing::holders_test
