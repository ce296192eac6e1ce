// Tests of state dicts of models: full, sharded (boxes of a rank) and local (flat shards of a rank).
#include "tessera/checkpoint/state_dict.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::state_dict_test {
namespace {

using checkpoint::full_state_dict;
using checkpoint::load_full_state_dict;
using checkpoint::load_local_state_dict;
using checkpoint::load_sharded_state_dict;
using checkpoint::local_state_dict;
using checkpoint::sharded_state_dict;
using checkpoint::StateDict;
using ::testing::AllOf;
using ::testing::HasSubstr;

ShardPicture sharded_by(Layout layout, Residence residence = Residence::Auto, Listing listing = Listing::ByName) {
  return [=](const std::shared_ptr<Picture>& model, const Communicator& world) {
    fully_shard(model->conv, {.mesh = world, .listing = listing, .residence = residence, .layout = layout});
    fully_shard(model, {.mesh = world, .listing = listing, .residence = residence, .layout = layout});
  };
}

/// Shards the model, over a mesh that also replicates if there are four ranks, and replicates one parameter.
void shard_in_rows(const std::shared_ptr<Picture>& model, const Communicator& world) {
  const auto mesh = world.size() == 4 ? Mesh(world, {.replicate = 2, .shard = 2}) : Mesh(world);
  fully_shard(model, {.mesh = mesh, .replicated = {model->conv->bias}});
}

std::vector<ShardPicture> ways() {
  return {sharded_by(Layout::Flat), sharded_by(Layout::Rows), sharded_by(Layout::WholeParameters, Residence::Gathered),
          sharded_by(Layout::Auto, Residence::Gathered, Listing::Flat), shard_in_rows};
}

/// Returns the state of a model that is not sharded, by libtorch alone.
StateDict plain_state(const torch::nn::Module& model) {
  StateDict result;
  for (const auto& item : model.named_parameters()) result[item.key()] = item.value().detach().clone();
  for (const auto& item : model.named_buffers()) result[item.key()] = item.value().clone();
  return result;
}

TEST(StateDicts, LeaveOutWhatIsFrozenOnRequest) {
  for (const auto& way : ways()) {
    with_ranks(2, [&](const Communicator& world) {
      const PictureRun run(world, way);
      auto expected = plain_state(Picture());
      std::erase_if(expected, [](const auto& item) { return item.first.starts_with("frozen."); });
      expect_same(full_state_dict(*run.model, {.ignore_frozen_params = true}), expected);
      for (const auto& [name, value] : sharded_state_dict(*run.model, {.ignore_frozen_params = true})) EXPECT_TRUE(expected.contains(name));
      EXPECT_EQ(local_state_dict(*run.model, {.ignore_frozen_params = true}).size(), sharded_state_dict(*run.model).size() - 2);
    });
  }
}

TEST(FullStateDict, IsThatOfPlainLibtorchInAllFourCombinations) {
  const auto expected = plain_state(Picture());
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& way : ways()) {
      with_ranks(ranks, [&](const Communicator& world) {
        const PictureRun run(world, way);
        for (const bool offload : {false, true}) {
          for (const bool rank0_only : {false, true}) {
            const auto dict = full_state_dict(*run.model, {.offload_to_cpu = offload, .rank0_only = rank0_only});
            if (rank0_only && world.rank() > 0) {
              EXPECT_TRUE(dict.empty());
            } else {
              expect_same(dict, expected);
            }
          }
        }
      });
    }
  }
}

TEST(FullStateDict, IsACopyThatTrainingDoesNotChange) {
  with_ranks(2, [](const Communicator& world) {
    const PictureRun run(world, shard_in_rows);
    run.train(0, 2);
    for (const bool offload : {false, true}) {
      const auto dict = full_state_dict(*run.model, {.offload_to_cpu = offload});
      StateDict before;
      for (const auto& [name, tensor] : dict) before[name] = tensor.clone();
      run.train(2, 4);
      expect_same(dict, before);
      const auto after = full_state_dict(*run.model);
      for (const auto* name : {"conv.weight", "conv.bias", "norm.running_mean"})
        EXPECT_FALSE(same_values(after.at(name), dict.at(name))) << name;
      expect_same(after, full_state(*run.model));
    }
  });
}

TEST(FullStateDict, HasOneTensorForAllNamesOfATiedParameter) {
  with_ranks(2, [](const Communicator& world) {
    const PictureRun run(world);
    auto dict = full_state_dict(*run.model);
    EXPECT_TRUE(dict.at("tied").is_same(dict.at("head.weight")));
    const PictureRun other(world, shard_nested, 0.25);
    dict.erase("head.weight");
    load_full_state_dict(*other.model, dict);
    expect_same(full_state_dict(*other.model), full_state_dict(*run.model));
  });
}

TEST(FullStateDict, KeepsTheOriginalDtypeOfBuffers) {
  with_ranks(2, [](const Communicator& world) {
    const auto make = [&](double scale) {
      const auto model = std::make_shared<Picture>(scale);
      fully_shard(model, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16, .buffer_dtype = at::kBFloat16}});
      return model;
    };
    const auto model = make(0.5), other = make(0.25);
    model->norm->running_mean.add_(1);
    const auto dict = full_state_dict(*model);
    EXPECT_EQ(dict.at("norm.running_mean").dtype(), at::kFloat);
    EXPECT_EQ(dict.at("norm.num_batches_tracked").dtype(), at::kLong);
    EXPECT_EQ(sharded_state_dict(*model).at("norm.running_mean").dtype, at::kFloat);
    EXPECT_EQ(local_state_dict(*model).at("norm.running_mean").values.dtype(), at::kFloat);
    load_full_state_dict(*other, dict);
    EXPECT_EQ(other->norm->running_mean.dtype(), at::kBFloat16);
    expect_same(full_state_dict(*other), dict);
  });
}

TEST(FullStateDict, HoldsOneUnitAtATimeOnTheOtherRanks) {
  with_ranks(2, [](const Communicator& world) {
    torch::nn::Sequential model;
    for (int i = 0; i < 6; i++) model->push_back(torch::nn::Linear(torch::nn::LinearOptions(64, 64).bias(false)));
    fill_with_numbers(*model);
    for (const auto& child : model->children()) fully_shard(child, {.mesh = world});
    fully_shard(model, {.mesh = world});
    constexpr int64_t kUnit = int64_t{4} * 64 * 64, kLittle = 8192;
    const Allocations allocations;
    const auto dict = full_state_dict(*model, {.rank0_only = true});
    if (world.rank() == 0) {
      EXPECT_GE(allocations.peak(), 6 * kUnit);
    } else {
      EXPECT_LE(allocations.peak(), kUnit + kLittle);
    }
    const Allocations more;
    load_full_state_dict(*model, dict, {.broadcast_from_rank0 = true});
    EXPECT_LE(more.peak(), kUnit + kLittle);
  });
}

TEST(FullStateDict, GoesIntoAnyOtherWorld) {
  const auto all = ways();
  for (size_t i = 0; i < all.size(); i++) {
    StateDict dict;
    with_ranks(1 + static_cast<int>(i) % 4, [&](const Communicator& world) {
      const PictureRun run(world, all[i]);
      run.train(0, 2);
      if (const auto state = full_state_dict(*run.model, {.rank0_only = true}); world.rank() == 0) dict = state;
    });
    const auto& other = all[(i + 1) % all.size()];
    for (const int others : {1, 2, 3, 4}) {
      with_ranks(others, [&](const Communicator& world) {
        for (const bool broadcast : {false, true}) {
          const PictureRun run(world, other, 0.25);
          load_full_state_dict(*run.model, broadcast && world.rank() > 0 ? StateDict() : dict, {.broadcast_from_rank0 = broadcast});
          EXPECT_TRUE(at::equal(run.model->norm->running_mean, dict.at("norm.running_mean"))) << "on each rank";
          expect_same(full_state_dict(*run.model), dict);
        }
      });
    }
  }
}

TEST(FullStateDict, GoesIntoAModelThatHasBeenUsed) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto residence : {Residence::Gathered, Residence::NodeShared}) {
      if (residence == Residence::NodeShared && !on_cpu()) continue;  // NodeShared needs host memory
      const PictureRun run(world, sharded_by(Layout::Auto, residence)), same(world, sharded_by(Layout::Auto, residence));
      const auto start = full_state_dict(*run.model);
      const auto x = numbers({4, 3, 4, 4}, world.rank());
      const auto expected = run.model->forward(x).sum().item<float>();
      run.train(0, 2);
      const auto loss = run.model->forward(x).sum();
      load_full_state_dict(*run.model, start);
      EXPECT_THROW(loss.backward(), std::exception) << "the graph has saved parameters that are no more";
      run.optimizer->zero_grad();
      EXPECT_EQ(run.model->forward(x).sum().item<float>(), expected);
    }
  });
}

TEST(FullStateDict, NeedsNoUnits) {
  Picture model;
  const auto dict = full_state_dict(model, {.rank0_only = true});
  expect_same(dict, plain_state(model));
  EXPECT_FALSE(dict.at("conv.weight").is_alias_of(model.conv->weight));
  EXPECT_TRUE(dict.at("tied").is_same(dict.at("head.weight")));
  Picture other(0.25);
  load_full_state_dict(other, dict);
  expect_same(plain_state(other), dict);
  EXPECT_THAT(message_of<UsageError>([&] { load_full_state_dict(other, dict, {.broadcast_from_rank0 = true}); }),
              HasSubstr("the model is not sharded"));
}

TEST(FullStateDict, RefusesOnAllRanksWhatDoesNotFit) {
  with_ranks(3, [](const Communicator& world) {
    const PictureRun run(world);
    const auto start = full_state_dict(*run.model);
    StateDict other;
    for (const auto& [name, tensor] : start) other[name] = at::zeros_like(tensor);
    const auto refused = [&]<class E>(E*, const StateDict& dict, const checkpoint::LoadStateDictOptions& options = {}) {
      const auto message = message_of<E>([&] { load_full_state_dict(*run.model, dict, options); });
      expect_same(full_state_dict(*run.model), start);
      return message;
    };
    UsageError* const usage = nullptr;
    DisagreementError* const disagreement = nullptr;
    const auto on = [&](int rank, const StateDict& dict) { return world.rank() == rank ? dict : other; };

    auto lacks = other;
    lacks.erase("conv.bias");
    lacks["more"] = at::ones({2});
    EXPECT_THAT(refused(usage, lacks), AllOf(HasSubstr("the state dict is of another model"), HasSubstr("it has no 'conv.bias'"),
                                             HasSubstr("the model has no 'more'"), HasSubstr("may_be_missing and may_be_unknown")));
    EXPECT_THAT(refused(usage, lacks, {.may_be_missing = {".*bias"}}), HasSubstr("the model has no 'more'"));
    EXPECT_THAT(refused(usage, world.rank() == 0 ? lacks : StateDict(), {.broadcast_from_rank0 = true}),
                HasSubstr("it has no 'conv.bias'"));
    EXPECT_THAT(refused(disagreement, on(1, lacks)), HasSubstr("different names, dtypes or shapes"));
    auto changed = other;
    changed["conv.bias"] = at::ones_like(other["conv.bias"]);
    EXPECT_THAT(refused(disagreement, on(1, changed)), HasSubstr("different values of 'conv.bias'"));

    auto wrong = other;
    wrong["conv.weight"] = at::ones({2, 2});
    EXPECT_THAT(refused(usage, wrong), HasSubstr("'conv.weight' is Float of [2, 2] there, but Float of [5, 3, 3, 3] in the model"));
    wrong["conv.weight"] = at::Tensor();
    EXPECT_THAT(refused(usage, on(2, wrong)), AllOf(HasSubstr("'conv.weight' in the state dict is undefined"),
                                                    HasSubstr(world.rank() == 2 ? "" : "rank 2 can't load its state dict")));
    wrong["conv.weight"] = at::empty({5, 3, 3, 3}, at::kMeta);
    EXPECT_THAT(refused(usage, on(1, wrong)), HasSubstr("'conv.weight' in the state dict is a tensor on the meta device"));
    wrong["conv.weight"] = run.model->conv->weight;
    EXPECT_THAT(refused(usage, world.rank() == 0 ? wrong : StateDict(), {.broadcast_from_rank0 = true}),
                HasSubstr("'conv.weight' in the state dict is a shard or a member of a sharded model"));
    {
      const auto guard = full_params(*run.model);
      EXPECT_THROW(load_full_state_dict(*run.model, other), UsageError);
    }
    expect_same(full_state_dict(*run.model), start);

    load_full_state_dict(*run.model, lacks, {.may_be_missing = {"conv\\..*"}, .may_be_unknown = {"more"}});
    const auto after = full_state_dict(*run.model);
    EXPECT_TRUE(at::equal(after.at("conv.bias"), start.at("conv.bias")));
    EXPECT_TRUE(at::equal(after.at("conv.weight"), other.at("conv.weight")));
  });
}

TEST(StateDicts, AreRefusedWhereNamesOfAParameterContradict) {
  with_ranks(2, [](const Communicator& world) {
    const PictureRun run(world);
    const auto start = full_state_dict(*run.model);
    const auto said = AllOf(HasSubstr("are one parameter in the model, but differ there"), HasSubstr("'tied'"), HasSubstr("'head.weight'"));
    for (const bool broadcast : {false, true}) {
      StateDict other;
      for (const auto& [name, tensor] : start) other[name] = at::zeros_like(tensor);
      load_full_state_dict(*run.model, other, {.broadcast_from_rank0 = broadcast});  // tied names with separate, but equal tensors
      load_full_state_dict(*run.model, start);
      if (world.rank() == 0 || !broadcast) other.at("tied") = at::ones_like(other.at("tied"));
      EXPECT_THAT(message_of<UsageError>([&] { load_full_state_dict(*run.model, other, {.broadcast_from_rank0 = broadcast}); }), said);
      expect_same(full_state_dict(*run.model), start);
    }
    auto slices = sharded_state_dict(*run.model);
    auto shards = local_state_dict(*run.model);
    slices["head.weight"] = slices.at("tied");
    shards["head.weight"] = shards.at("tied");
    load_sharded_state_dict(*run.model, slices);
    load_local_state_dict(*run.model, shards);
    for (auto& values : slices["head.weight"].values) values = values + 1;
    shards["head.weight"].values = shards.at("tied").values + 1;
    EXPECT_THAT(message_of<UsageError>([&] { load_sharded_state_dict(*run.model, slices); }), said);
    EXPECT_THAT(message_of<UsageError>([&] { load_local_state_dict(*run.model, shards); }), said);
    expect_same(full_state_dict(*run.model), start);
  });
}

TEST(FullStateDict, IsRefusedInTheMiddleOfAPass) {
  with_ranks(2, [](const Communicator& world) {
    const PictureRun run(world);
    std::vector<std::string> messages;
    const auto loss = run.model->forward(numbers({4, 3, 4, 4})).pow(2).mean();
    loss.register_hook([&](const at::Tensor&) {
      messages.push_back(message_of<UsageError>([&] { (void)full_state_dict(*run.model); }));
      messages.push_back(message_of<UsageError>([&] { load_full_state_dict(*run.model, {}); }));
      messages.push_back(message_of<UsageError>([&] { (void)local_state_dict(*run.model); }));
    });
    loss.backward();
    EXPECT_THAT(messages, ::testing::ElementsAre(HasSubstr("full_state_dict was called during backward"),
                                                 HasSubstr("load_full_state_dict was called during backward"),
                                                 HasSubstr("local_state_dict was called during backward")));
  });
}

TEST(ShardedStateDict, HasTheBoxesOfARankAndGoesBack) {
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& way : ways()) {
      StateDict counts;
      std::mutex mutex;
      with_ranks(ranks, [&](const Communicator& world) {
        const PictureRun run(world, way);
        run.train(0, 2);
        run.model->norm->running_mean.add_(world.rank());
        const auto whole = full_state_dict(*run.model);
        const auto dict = sharded_state_dict(*run.model, {.offload_to_cpu = true});
        const PictureRun other(world, way, 0.25);
        load_sharded_state_dict(*other.model, dict);
        expect_same(full_state_dict(*other.model), whole);
        EXPECT_TRUE(at::equal(other.model->norm->running_mean, run.model->norm->running_mean));
        run.train(2, 3);
        EXPECT_FALSE(dict.contains("head.weight")) << "its first name is that which libtorch lists first";
        const std::lock_guard lock(mutex);
        for (const auto& [name, tensor] : dict) {
          EXPECT_EQ(at::IntArrayRef(tensor.shape), whole.at(name).sizes());
          auto& count = counts.try_emplace(name, at::zeros(tensor.shape)).first->second;
          for (size_t i = 0; i < tensor.slices.size(); i++) {
            view_of(count, tensor.slices[i]).add_(1);
            if (name.starts_with("norm.running")) continue;  // each rank has its own
            EXPECT_TRUE(same_values(tensor.values[i], view_of(whole.at(name), tensor.slices[i]))) << name;
          }
        }
      });
      for (const auto& [name, count] : counts) EXPECT_TRUE(count.gt(0).all().item<bool>()) << name << " is not complete";
    }
  }
}

TEST(ShardedStateDict, GoesWhereARankHasItsValues) {
  with_ranks(1, [](const Communicator& world) {
    const PictureRun flat(world, sharded_by(Layout::Flat));
    const PictureRun rows(world, sharded_by(Layout::Rows), 0.25);
    load_sharded_state_dict(*rows.model, sharded_state_dict(*flat.model));
    expect_same(full_state_dict(*rows.model), full_state_dict(*flat.model));
  });
  with_ranks(3, [](const Communicator& world) {
    const PictureRun flat(world, sharded_by(Layout::Flat));
    const PictureRun rows(world, sharded_by(Layout::Rows), 0.25);
    const auto before = full_state_dict(*rows.model);
    auto dict = sharded_state_dict(*flat.model);
    EXPECT_THAT(message_of<UsageError>([&] { load_sharded_state_dict(*rows.model, dict); }),
                AllOf(HasSubstr("the sharded state dict lacks the values ["), HasSubstr("load a full state dict")));
    if (world.rank() == 1) dict.at("head.bias").slices.push_back({});
    EXPECT_THAT(message_of<UsageError>([&] { load_sharded_state_dict(*flat.model, dict); }),
                HasSubstr("'head.bias' in the state dict has"));
    expect_same(full_state_dict(*rows.model), before);
  });
}

TEST(LocalStateDict, HasTheShardsAsTheyLieAndGoesBack) {
  for (const auto& way : ways()) {
    with_ranks(3, [&](const Communicator& world) {
      const PictureRun run(world, way);
      run.train(0, 2);
      const auto whole = full_state_dict(*run.model);
      const auto dict = local_state_dict(*run.model);
      run.train(2, 3);
      const PictureRun other(world, way, 0.25);
      load_local_state_dict(*other.model, dict);
      expect_same(full_state_dict(*other.model), whole);
      for (const auto& [name, tensor] : dict) {
        EXPECT_EQ(tensor.values.dim(), 1);
        const auto views = views_of_slices(tensor.values, tensor.slices, tensor.strides);
        if (name.starts_with("norm.running")) continue;  // each rank's own
        for (size_t i = 0; i < views.size(); i++) EXPECT_TRUE(same_values(views[i], view_of(whole.at(name), tensor.slices[i]))) << name;
      }
    });
  }
}

TEST(LocalStateDict, IsRefusedInAnotherLayout) {
  with_ranks(2, [](const Communicator& world) {
    const PictureRun flat(world, sharded_by(Layout::Flat));
    const PictureRun rows(world, sharded_by(Layout::Rows), 0.25);
    const auto before = full_state_dict(*rows.model);
    auto dict = local_state_dict(*flat.model);
    EXPECT_THAT(message_of<UsageError>([&] { load_local_state_dict(*rows.model, dict); }),
                HasSubstr("the local state dict is of another layout"));
    expect_same(full_state_dict(*rows.model), before);
    dict.erase("head.bias");
    EXPECT_THAT(message_of<UsageError>([&] { load_local_state_dict(*flat.model, dict); }), HasSubstr("it has no 'head.bias'"));
    load_local_state_dict(*flat.model, dict, {.may_be_missing = {"head.bias"}});
  });
}

/// Tests a part of a model whose parameters are in the unit of the whole model.
TEST(StateDicts, OfAPartHaveOnlyWhatThePartHolds) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      if (residence == Residence::NodeShared && !on_cpu()) continue;  // NodeShared needs host memory
      auto net = seeded_net();
      fully_shard(net, {.mesh = world, .residence = residence});
      const auto dict = full_state_dict(*net->b);
      expect_same(dict, plain_state(*seeded_net()->b));
      EXPECT_EQ(sharded_state_dict(*net->b).size(), 2U);
      EXPECT_EQ(local_state_dict(*net->b).size(), 2U);
      StateDict other;
      for (const auto& [name, tensor] : dict) other[name] = tensor + 1;
      load_full_state_dict(*net->b, other);
      expect_same(full_state_dict(*net->b), other);
      expect_same(full_state_dict(*net->a), plain_state(*seeded_net()->a));
      net(input());
    }
    // If ranks start with different values, loading a part of the model does not make the rest equal.
    Net net;
    const torch::NoGradGuard no_grad;
    for (const auto& parameter : net->parameters()) parameter.fill_(world.rank());
    fully_shard(net, {.mesh = world});
    load_full_state_dict(*net->b, plain_state(*seeded_net()->b));
    EXPECT_THAT(message_of<UsageError>([&] { net(input()); }), HasSubstr("the ranks brought different parameters"));
    load_full_state_dict(*net, plain_state(*seeded_net()));
    net(input());
  });
}

}  // namespace
}  // namespace tessera::testing::state_dict_test
