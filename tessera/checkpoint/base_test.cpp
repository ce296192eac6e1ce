// A checkpoint that refers to a base is valid for the weights that the base had: if the base has changed since, saves and loads refuse it.
#include "tessera/checkpoint/base.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <string>

#include "tessera/base/error.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/self/self.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::base_test {
namespace {

using ::testing::HasSubstr;

/// A Net with a buffer. adapted() adds adapters to its layers a and b.
struct ScaledImpl : torch::nn::Module {
  Net net = register_module("net", seeded_net());
  at::Tensor scale = register_buffer("scale", at::ones({4}));
  at::Tensor forward(const at::Tensor& x) { return net(x) * scale; }
};
TORCH_MODULE(Scaled);

Scaled adapted() {
  Scaled model;
  lora::apply(model, {.r = 2});
  return model;
}

void train(Scaled& model, optim::AdamW& optimizer, int steps) {
  for (int step = 0; step < steps; step++) {
    model(input()).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  }
}

/// Ways in which frozen values change.
struct Change {
  const char* name;
  std::function<void(Scaled& model, const Folder& folder)> act;
};
const Change kChanges[] = {
    {"in place",
     [](Scaled& model, const Folder&) {
       const torch::NoGradGuard no_grad;
       const auto whole = full_params(*model, Access::Write);
       model->net->b->weight.mul_(1.01);
     }},
    {"by load_weights",
     [](Scaled& model, const Folder& folder) { checkpoint::load_weights(model, folder / "other", {.may_be_missing = {".*\\.lora_.*"}}); }},
    {"merged and taken out",
     [](Scaled& model, const Folder&) {
       lora::merge(model);
       lora::unmerge(model);
     }},
};

TEST(Base, ThatHasChangedIsRefused) {
  const Folder folder;
  {
    Scaled other;
    const torch::NoGradGuard no_grad;
    other->net->a->bias.add_(1);
    checkpoint::save(folder / "other", {.model = other.get()}, self_world());
  }
  for (const auto residence : residences()) {
    for (const auto& change : kChanges) {
      SCOPED_TRACE(change.name);
      const std::string saved = folder / (std::string("run ") + change.name + (residence == Residence::Gathered ? "-g" : "-s"));
      with_ranks(2, [&](const Communicator& world) {
        auto model = adapted();
        fully_shard(model, {.mesh = world, .residence = residence});
        optim::AdamW optimizer(parameters(model), {.lr = 0.1});
        train(model, optimizer, 2);
        checkpoint::Contents contents{.model = model.get(), .optimizer = &optimizer, .base = checkpoint::base_of(model, "a base")};
        checkpoint::save(saved, contents, world);
        train(model, optimizer, 1);
        checkpoint::load(saved, contents, world);
        change.act(model, folder);
        const auto refused = AllOf(HasSubstr("has changed since checkpoint::base_of(model, \"a base\")"), HasSubstr("call base_of"));
        EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(saved + "-again", contents, world); }), refused);
        EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(saved, contents, world); }), refused);
        checkpoint::AsyncSaver saver(world);
        saver.save(saved + "-aside", contents);
        EXPECT_THAT(message_of<UsageError>([&] { saver.wait(); }), refused);
        contents.base = checkpoint::base_of(model, "a base");
        EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(saved, contents, world); }), HasSubstr("has other values"));
        checkpoint::save(saved + "-again", contents, world);
      });
    }
  }
}

TEST(Base, ThatIsShardedSinceIsRefused) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto model = adapted();
    const auto base = checkpoint::base_of(model, "a base");
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "run", {.model = model.get(), .base = base}, world); }),
                HasSubstr("or was sharded since"));
  });
}

/// Buffers are not a part of the base, so checkpoints hold them.
TEST(Base, LeavesBuffersToCheckpoints) {
  const Folder folder;
  auto model = adapted();
  checkpoint::Contents contents{.model = model.get(), .base = checkpoint::base_of(model, "a base")};
  model->scale.fill_(3);
  checkpoint::save(folder / "run", contents, self_world());
  const auto expected = model(input());
  model->scale.fill_(5);
  checkpoint::load(folder / "run", contents, self_world());
  EXPECT_TRUE(at::equal(model(input()), expected));
}

}  // namespace
}  // namespace tessera::testing::base_test
