// Modules on the meta device: who gives them their values, and what happens if nobody does.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/local.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::meta_module_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using torch::nn::Module;

/// Moves a module to the meta device, as libraries do that load models from files.
void move_to_meta(const Module& module) {
  const auto move = [](const at::Tensor& tensor) {
    tensor.unsafeGetTensorImpl()->shallow_copy_from(at::empty_like(tensor.detach(), at::kMeta).getIntrusivePtr());
  };
  for (const auto& parameter : module.parameters()) move(parameter);
  for (const auto& buffer : module.buffers()) move(buffer);
}

TEST(MetaModule, IsFilledByTheInitFunction) {
  with_ranks(2, [](const Communicator& world) {
    Net net;
    move_to_meta(*net);
    std::vector<std::string> names;
    fully_shard(net, {.mesh = world, .param_init_fn = [&](const std::string& name, at::Tensor& values) {
                        names.push_back(name);
                        values.fill_(static_cast<double>(names.size()));
                      }});
    EXPECT_EQ(names, (std::vector<std::string>{"a.weight", "a.bias", "b.weight", "b.bias", "c.weight", "c.bias"}));
    EXPECT_EQ(full_state(*net)["b.weight"].min().item<float>(), 3);
    EXPECT_EQ(full_state(*net)["b.weight"].sizes(), at::IntArrayRef({10, 10}));
  });
}

TEST(MetaModule, IsMaterializedByAFunction) {
  struct Scaled : Module {
    at::Tensor scale, offset;
    Scaled() {
      scale = register_parameter("scale", torch::ones({3}));
      offset = register_buffer("offset", torch::ones({3}));
    }
  };
  Scaled model;
  move_to_meta(model);
  EXPECT_THAT(message_of<UsageError>([&] { materialize(model); }), HasSubstr("nobody knows the values of 'scale', 'offset'"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)(model.offset + 1); }), HasSubstr("buffer 'offset', which has none"));
  materialize(model, [](const std::string& name, at::Tensor& values) { values.fill_(name == "scale" ? 2 : 3); });
  EXPECT_TRUE(at::equal(model.scale + model.offset, at::full({3}, 5.0)));
}

TEST(MetaModule, IsAnErrorByNameUntilItIsLoaded) {
  for (const auto start : {Start::Equal, Start::Loaded}) {
    with_ranks(2, [&](const Communicator& world) {
      auto net = deferred_init([] { return Net(); });
      if (start == Start::Equal) {
        net = Net();
        move_to_meta(*net);
      }
      fully_shard(net, {.mesh = world, .start = start});
      const auto expected = AllOf(HasSubstr("'a.weight'"), HasSubstr("nobody has loaded or initialised"));
      EXPECT_THAT(message_of<UsageError>([&] { net->forward(input()); }), expected);
      EXPECT_THAT(message_of<UsageError>([&] { full_state(*net); }), expected);
      EXPECT_THAT(message_of<UsageError>([&] { (void)net->parameters()[0].abs(); }), expected);
      EXPECT_THAT(message_of<UsageError>([&] { to_local(net->parameters()[0]); }), expected);
      torch::NoGradGuard no_grad;
      for (auto& shard : net->parameters()) shard.fill_(0.5);
      EXPECT_EQ(net->forward(input()).sizes(), at::IntArrayRef({3, 4}));
    });
  }
}

TEST(MetaModule, OnSomeRanksNeedsTheValuesOfRank0) {
  const auto part_on_meta = [](const Communicator& world) {
    Net net = seeded_net();
    if (!world.is_first()) move_to_meta(*net);
    return net;
  };
  with_ranks(3, [&](const Communicator& world) {
    auto net = part_on_meta(world);
    fully_shard(net, {.mesh = world});
    EXPECT_THAT(message_of<ConfigError>([&] { net->forward(input()); }), HasSubstr("Start::FromRank0"));
  });
  with_ranks(3, [&](const Communicator& world) {
    auto net = part_on_meta(world);
    fully_shard(net, {.mesh = world, .start = Start::FromRank0});
    const auto found = full_state(*net);
    for (const auto& item : seeded_net()->named_parameters()) EXPECT_TRUE(at::equal(found.at(item.key()), item.value())) << item.key();
  });
  with_ranks(2, [&](const Communicator& world) {
    Net net;
    if (world.is_first()) move_to_meta(*net);
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .start = Start::FromRank0}); }),
                AllOf(HasSubstr("has no values for"), HasSubstr("'a.weight'")));
  });
}

TEST(MetaModule, TakesWhatTheInitFunctionPutsInPlaceOfTheValues) {
  const auto transposed = at::arange(60, at::kFloat).view({6, 10}).t();
  const InitFunction assigns = [&](const std::string& name, at::Tensor& values) {
    values = name == "a.weight" ? transposed : at::zeros(values.sizes(), at::kDouble);
  };
  with_ranks(2, [&](const Communicator& world) {
    for (const auto layout : {Layout::Flat, Layout::Rows}) {
      Net net;
      move_to_meta(*net);
      fully_shard(net, {.mesh = world, .param_init_fn = assigns, .layout = layout});
      EXPECT_TRUE(at::equal(full_state(*net)["a.weight"], transposed));
    }
    Net net;
    move_to_meta(*net);
    materialize(*net, assigns);
    EXPECT_TRUE(at::equal(net->a->weight, transposed));
    Net other;
    move_to_meta(*other);
    const InitFunction resizes = [](const std::string&, at::Tensor& values) { values = at::zeros({100}); };
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(other, {.mesh = world, .param_init_fn = resizes}); }),
                HasSubstr("param_init_fn gave a tensor of [100] for 'a.weight', which has the shape [10, 6]"));
  });
}

TEST(MetaModule, IsLoadedByTorchLoad) {
  const Folder folder;
  torch::save(seeded_net(), folder / "net.pt");
  auto net = deferred_init([] { return Net(); });
  torch::load(net, folder / "net.pt");
  for (const auto& item : seeded_net()->named_parameters()) EXPECT_TRUE(at::equal(net->named_parameters()[item.key()], item.value()));
}

TEST(MetaModule, StaysAsItWasIfTheInitFunctionFails) {
  for (const auto start : {Start::Equal, Start::FromRank0}) {
    with_ranks(3, [&](const Communicator& world) {
      Net net;
      move_to_meta(*net);
      const auto with = [&](const InitFunction& init) { fully_shard(net, {.mesh = world, .start = start, .param_init_fn = init}); };
      const auto failing_rank = start == Start::FromRank0 ? 0 : 1;
      const auto message = message_of<UsageError>([&] {
        with([&](const std::string& name, at::Tensor& values) {
          if (name == "b.weight" && world.rank() == failing_rank) throw UsageError("no such distribution");
          values.fill_(1);
        });
      });
      EXPECT_THAT(message, HasSubstr("no such distribution"));
      if (world.rank() != failing_rank) {
        EXPECT_THAT(message, HasSubstr("rank " + std::to_string(failing_rank) + " can't make its parameters"));
      }
      for (const auto& parameter : net->parameters()) {
        EXPECT_TRUE(parameter.is_meta());
        EXPECT_FALSE(shard_info(parameter));
      }
      with([](const std::string&, at::Tensor& values) { values.fill_(2); });
      EXPECT_EQ(full_state(*net)["b.weight"].min().item<float>(), 2);
    });
  }
}

TEST(MetaModule, ThatCanNotBeSentLeavesTheValuesOfOtherRanksAlone) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    if (world.is_first()) move_to_meta(*net);
    const InitFunction fails = [](const std::string&, at::Tensor&) { throw UsageError("no such distribution"); };
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .start = Start::FromRank0, .param_init_fn = fails}); }),
                HasSubstr("no such distribution"));
    if (world.is_first()) return;
    for (const auto& item : seeded_net()->named_parameters()) EXPECT_TRUE(at::equal(net->named_parameters()[item.key()], item.value()));
  });
}

TEST(MetaModule, FailsOnAllRanksIfABufferCanNotBeMade) {
  with_ranks(2, [](const Communicator& world) {
    torch::nn::BatchNorm1d norm(3);
    move_to_meta(*norm);
    const auto with = [&](bool fails) {
      fully_shard(norm, {.mesh = world, .param_init_fn = [&](const std::string& name, at::Tensor& values) {
                           if (fails && name == "running_mean") throw 17;
                           values.fill_(1);
                         }});
    };
    EXPECT_ANY_THROW(with(world.rank() == 1));
    EXPECT_FALSE(shard_info(norm->weight));
    with(false);
    EXPECT_TRUE(shard_info(norm->parameters()[0]));
  });
}

TEST(MetaModule, ListedFlatHasItsValuesWhenTheVectorIsWritten) {
  with_ranks(2, [](const Communicator& world) {
    Net net;
    move_to_meta(*net);
    fully_shard(net, {.mesh = world, .start = Start::Loaded, .listing = Listing::Flat});
    const auto flat = net->parameters().at(0);
    EXPECT_THAT(message_of<UsageError>([&] { (void)flat.abs(); }), HasSubstr("'a.weight'"));
    torch::NoGradGuard no_grad;
    flat.fill_(0.5);
    EXPECT_TRUE(at::allclose(to_local(flat.detach()), at::full({1}, 0.5)));
    EXPECT_EQ(net->forward(input()).sizes(), at::IntArrayRef({3, 4}));
  });
}

}  // namespace
}  // namespace tessera::testing::meta_module_test
