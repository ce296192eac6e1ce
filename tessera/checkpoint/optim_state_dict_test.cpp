// Tests of state dicts of optimizers, whole and sharded.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::optim_state_dict_test {
namespace {

using checkpoint::full_optim_state_dict;
using checkpoint::full_state_dict;
using checkpoint::load_full_optim_state_dict;
using checkpoint::load_full_state_dict;
using checkpoint::load_sharded_optim_state_dict;
using checkpoint::OptimStateDict;
using checkpoint::sharded_optim_state_dict;
using checkpoint::StateDict;
using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_equal(const OptimStateDict& actual, const OptimStateDict& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (const auto& [name, state] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    ASSERT_EQ(actual.at(name).size(), state.size()) << name;
    for (const auto& [key, tensor] : state) {
      EXPECT_TRUE(same_values(actual.at(name).at(key), tensor)) << name << " " << key;
      EXPECT_EQ(actual.at(name).at(key).dtype(), tensor.dtype()) << name << " " << key;
    }
  }
}

OptimStateDict copy_of(const OptimStateDict& dict) {
  OptimStateDict result;
  for (const auto& [name, state] : dict) {
    for (const auto& [key, tensor] : state) result[name][key] = tensor.clone();
  }
  return result;
}

std::vector<at::Tensor> trained(const std::vector<at::Tensor>& parameters) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : parameters) {
    if (parameter.requires_grad()) result.push_back(parameter);
  }
  return result;
}

using Way = std::function<void(Picture&, const Communicator&)>;

std::vector<Way> ways() {
  const auto by = [](Layout layout, Listing listing = Listing::ByName) {
    return [=](Picture& model, const Communicator& world) {
      fully_shard(model.conv, {.mesh = world, .listing = listing, .layout = layout});
      fully_shard(model, {.mesh = world, .listing = listing, .layout = layout});
    };
  };
  const auto replicated = [](Picture& model, const Communicator& world) {
    const auto mesh = world.size() == 4 ? Mesh(world, {.replicate = 2, .shard = 2}) : Mesh(world);
    fully_shard(model, {.mesh = mesh, .ignored = {model.conv->bias}});
  };
  return {by(Layout::Flat), by(Layout::Rows), by(Layout::WholeParameters), by(Layout::Auto, Listing::Flat), replicated};
}

/// A run on the same batches on all ranks, with Tessera's AdamW or libtorch's.
struct TrainedPicture {
  std::shared_ptr<Picture> model;
  std::unique_ptr<optim::AdamW> ours = {};
  std::unique_ptr<torch::optim::Adam> theirs = {};

  TrainedPicture(const Communicator& world, const Way& way, bool own, double scale = 0.5) : model(std::make_shared<Picture>(scale)) {
    way(*model, world);
    make_optimizer(parameters(*model), own);
  }
  explicit TrainedPicture(bool own) : model(std::make_shared<Picture>()) { make_optimizer(parameters(*model), own); }

  checkpoint::OptimizerRef optimizer() const {
    if (ours) return ours.get();
    return theirs.get();
  }
  void train(int first, int last) const {
    for (int step = first; step < last; step++) {
      model->forward(numbers({4, 3, 4, 4}, step)).pow(2).mean().backward();
      if (ours) {
        ours->step();
        ours->zero_grad();
      } else {
        theirs->step();
        theirs->zero_grad();
      }
    }
  }

 private:
  void make_optimizer(const std::vector<at::Tensor>& all, bool own) {
    if (own) {
      ours = std::make_unique<optim::AdamW>(trained(all), optim::AdamWOptions{.lr = 0.05});
    } else {
      theirs = std::make_unique<torch::optim::Adam>(trained(all), torch::optim::AdamOptions(0.05).amsgrad(true));
    }
  }
};

/// Returns the state of libtorch's own optimizer, for a model that is not sharded.
OptimStateDict plain_state(const TrainedPicture& run) {
  OptimStateDict result;
  for (const auto& item : run.model->named_parameters()) {
    const auto found = run.theirs->state().find(item.value().unsafeGetTensorImpl());
    if (found == run.theirs->state().end() || item.key() == "tied") continue;
    auto& state = static_cast<torch::optim::AdamParamState&>(*found->second);
    result[item.key()] = {{"step", at::scalar_tensor(state.step(), at::kLong)},
                          {"exp_avg", state.exp_avg()},
                          {"exp_avg_sq", state.exp_avg_sq()},
                          {"max_exp_avg_sq", state.max_exp_avg_sq()}};
  }
  return result;
}

/// Returns the dict with the tied parameter under `name` instead of `other`.
OptimStateDict with_name(OptimStateDict dict, const std::string& name, const std::string& other) {
  if (dict.contains(other)) {
    auto state = dict.extract(other);
    state.key() = name;
    dict.insert(std::move(state));
  }
  return dict;
}

TEST(FullOptimStateDict, IsThatOfPlainLibtorchInAllFourCombinations) {
  const TrainedPicture plain(/*own=*/false);
  plain.train(0, 2);
  const auto expected = with_name(plain_state(plain), "tied", "head.weight");
  for (const int ranks : {1, 2, 3, 4}) {
    for (const auto& way : ways()) {
      with_ranks(ranks, [&](const Communicator& world) {
        const TrainedPicture run(world, way, /*own=*/false);
        EXPECT_TRUE(full_optim_state_dict(run.optimizer(), *run.model).empty());
        run.train(0, 2);
        for (const bool offload : {false, true}) {
          for (const bool rank0_only : {false, true}) {
            auto dict = full_optim_state_dict(run.optimizer(), *run.model, {.offload_to_cpu = offload, .rank0_only = rank0_only});
            if (rank0_only && world.rank() > 0) {
              EXPECT_TRUE(dict.empty());
              continue;
            }
            dict = with_name(std::move(dict), "tied", "head.weight");
            ASSERT_EQ(dict.size(), expected.size());
            for (const auto& [name, state] : expected) {
              ASSERT_TRUE(dict.contains(name)) << name;
              ASSERT_EQ(dict.at(name).size(), 4);
              for (const auto& [key, tensor] : state) {
                EXPECT_EQ(dict.at(name).at(key).sizes(), tensor.sizes());
                EXPECT_TRUE(at::allclose(dict.at(name).at(key).to(tensor.device()), tensor, 1e-4, 1e-7)) << name << " " << key;
              }
            }
          }
        }
      });
    }
  }
}

TEST(FullOptimStateDict, GoesIntoAnyOtherWorld) {
  const auto all = ways();
  for (const bool own : {true, false}) {
    for (size_t i = 0; i < all.size(); i++) {
      OptimStateDict dict;
      with_ranks(3, [&](const Communicator& world) {
        const TrainedPicture run(world, all[i], own);
        run.train(0, 2);
        const auto state = full_optim_state_dict(run.optimizer(), *run.model);
        const auto before = copy_of(state);
        run.train(2, 3);
        expect_equal(state, before);
        if (world.rank() == 0) dict = state;
      });
      ASSERT_FALSE(dict.empty());
      const auto& other = all[(i + 1) % all.size()];
      for (const int others : {1, 2, 4}) {
        with_ranks(others, [&](const Communicator& world) {
          for (const bool broadcast : {false, true}) {
            const TrainedPicture run(world, other, own);
            load_full_optim_state_dict(run.optimizer(), *run.model, broadcast && world.rank() > 0 ? OptimStateDict() : dict,
                                       {.broadcast_from_rank0 = broadcast});
            expect_equal(full_optim_state_dict(run.optimizer(), *run.model), dict);
          }
        });
      }
    }
  }
}

TEST(FullOptimStateDict, LetsARunGoOnToTheBit) {
  for (const bool own : {true, false}) {
    with_ranks(3, [&](const Communicator& world) {
      for (const auto& way : ways()) {
        const TrainedPicture run(world, way, own), fresh(world, way, own, 0.25);
        run.train(0, 2);
        fresh.train(5, 6);
        const auto model = full_state_dict(*run.model);
        const auto state = full_optim_state_dict(run.optimizer(), *run.model);
        run.train(2, 4);
        load_full_state_dict(*fresh.model, model);
        load_full_optim_state_dict(fresh.optimizer(), *fresh.model, state);
        fresh.train(2, 4);
        const auto expected = full_state_dict(*run.model), actual = full_state_dict(*fresh.model);
        for (const auto& [name, tensor] : expected) EXPECT_TRUE(at::equal(actual.at(name), tensor)) << name;
      }
    });
  }
}

struct Few : torch::nn::Module {
  at::Tensor one = register_parameter("one", at::full({}, 0.5)), three = register_parameter("three", at::ones({3}));
  at::Tensor forward() { return (one * three).sum(); }
};

TEST(FullOptimStateDict, KnowsParametersOfOneValue) {
  with_ranks(4, [](const Communicator& world) {
    const auto model = std::make_shared<Few>();
    fully_shard(model, {.mesh = world});
    optim::AdamW optimizer(parameters(*model), {.lr = 0.1}), other(parameters(*model), {.lr = 0.1});
    model->forward().backward();
    optimizer.step();
    const auto dict = full_optim_state_dict(&optimizer, *model);
    ASSERT_EQ(dict.size(), 2);
    EXPECT_EQ(dict.at("one").at("exp_avg").dim(), 0);
    EXPECT_EQ(dict.at("one").at("step").item<int64_t>(), 1);
    load_full_optim_state_dict(&other, *model, dict);
    expect_equal(full_optim_state_dict(&other, *model), dict);
  });
}

TEST(FullOptimStateDict, RefusesOnAllRanksWhatDoesNotFit) {
  with_ranks(3, [](const Communicator& world) {
    const TrainedPicture run(world, ways()[0], /*own=*/true), torch_run(world, ways()[0], /*own=*/false);
    run.train(0, 1);
    torch_run.train(0, 1);
    const auto dict = full_optim_state_dict(run.optimizer(), *run.model);
    const auto refused = [&](const OptimStateDict& other, const checkpoint::LoadStateDictOptions& options = {}) {
      const auto message = message_of<UsageError>([&] { load_full_optim_state_dict(run.optimizer(), *run.model, other, options); });
      expect_equal(full_optim_state_dict(run.optimizer(), *run.model), dict);
      return message;
    };
    auto other = copy_of(dict);
    for (auto& [name, state] : other) state.at("exp_avg").zero_();
    other["adapter.weight"]["exp_avg"] = at::ones({2});
    EXPECT_THAT(refused(other), AllOf(HasSubstr("the model has no 'adapter.weight'"), HasSubstr("may_be_unknown")));
    EXPECT_THAT(refused(world.rank() == 0 ? other : OptimStateDict(), {.broadcast_from_rank0 = true}),
                HasSubstr("the model has no 'adapter"));
    EXPECT_THAT(
        message_of<DisagreementError>([&] { load_full_optim_state_dict(run.optimizer(), *run.model, world.rank() == 1 ? other : dict); }),
        HasSubstr("different names"));
    other.at("conv.bias").at("exp_avg") = at::ones({4});
    EXPECT_THAT(refused(other, {.may_be_unknown = {"adapter.*"}}), HasSubstr("'exp_avg' of 'conv.bias' is of [4] there, but of [5]"));
    EXPECT_THAT(refused(full_optim_state_dict(torch_run.optimizer(), *torch_run.model)), HasSubstr("which this optimizer"));
    other.at("conv.bias").at("exp_avg") = at::zeros({5});
    load_full_optim_state_dict(run.optimizer(), *run.model, other, {.may_be_unknown = {"adapter.*"}});
    other.erase("adapter.weight");
    expect_equal(full_optim_state_dict(run.optimizer(), *run.model), other);
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_optim_state_dict(nullptr, *run.model); }), HasSubstr("null pointer"));

    if (world.rank() == 2) torch_run.theirs->state().clear();
    EXPECT_THAT(message_of<DisagreementError>([&] { (void)full_optim_state_dict(torch_run.optimizer(), *torch_run.model); }),
                HasSubstr("have state for different parameters"));
  });
}

TEST(ShardedOptimStateDict, HasTheBoxesOfARankAndGoesBack) {
  for (const bool own : {true, false}) {
    for (const auto& way : ways()) {
      with_ranks(3, [&](const Communicator& world) {
        const TrainedPicture run(world, way, own), fresh(world, way, own, 0.25);
        run.train(0, 2);
        const auto whole = full_optim_state_dict(run.optimizer(), *run.model);
        const auto dict = sharded_optim_state_dict(run.optimizer(), *run.model, {.offload_to_cpu = true});
        run.train(2, 3);
        ASSERT_EQ(dict.size(), whole.size());
        for (const auto& [name, state] : dict) {
          for (const auto& [key, tensor] : state) {
            const auto& expected = whole.at(name).at(key);
            EXPECT_EQ(at::IntArrayRef(tensor.shape), expected.sizes());
            for (size_t i = 0; i < tensor.slices.size(); i++)
              EXPECT_TRUE(same_values(tensor.values[i], view_of(expected, tensor.slices[i])));
          }
        }
        load_sharded_optim_state_dict(fresh.optimizer(), *fresh.model, dict);
        expect_equal(full_optim_state_dict(fresh.optimizer(), *fresh.model), whole);
      });
    }
  }
}

TEST(ShardedOptimStateDict, IsRefusedWhereARankLacksValues) {
  with_ranks(3, [](const Communicator& world) {
    const TrainedPicture flat(world, ways()[0], /*own=*/true), rows(world, ways()[1], /*own=*/true);
    flat.train(0, 1);
    const auto dict = sharded_optim_state_dict(flat.optimizer(), *flat.model);
    EXPECT_THAT(message_of<UsageError>([&] { load_sharded_optim_state_dict(rows.optimizer(), *rows.model, dict); }),
                AllOf(HasSubstr("the sharded state dict lacks the values ["), HasSubstr("load a full state dict")));
    EXPECT_TRUE(full_optim_state_dict(rows.optimizer(), *rows.model).empty());
  });
}

TEST(FullOptimStateDict, RefusesStateInBlocks) {
  if (!on_cpu()) GTEST_SKIP() << "AdamW8bit works in host memory";
  with_ranks(2, [](const Communicator& world) {
    torch::nn::Linear model(64, 64);
    fill_with_numbers(*model);
    fully_shard(model, {.mesh = world});
    optim::AdamW8bit optimizer(parameters(*model), {.lr = 0.1});
    model->forward(numbers({4, 64})).pow(2).mean().backward();
    optimizer.step();
    EXPECT_THAT(message_of<UsageError>([&] { (void)full_optim_state_dict(&optimizer, *model); }),
                AllOf(HasSubstr("has one value for each block"), HasSubstr("save it with checkpoint::save")));
  });
}

}  // namespace
}  // namespace tessera::testing::optim_state_dict_test
