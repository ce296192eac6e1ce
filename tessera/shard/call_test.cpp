// tessera::call, and what MixedPrecision does at the boundary of a module.
#include "tessera/shard/call.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::call_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// Takes and returns more than tensors, and notes the dtype of its input.
struct PairsImpl : nn::Module {
  nn::Linear linear = register_module("linear", nn::Linear(6, 6));
  at::ScalarType seen = at::kInt, index = at::kInt;
  std::optional<std::string> phase;
  PairsImpl() { fill_with_numbers(*this); }
  std::map<std::string, at::Tensor> forward(const std::vector<at::Tensor>& xs, const at::Tensor& which, double scale, std::string* out) {
    seen = xs.front().scalar_type();
    index = which.scalar_type();
    phase = forward_phase();
    *out = "seen";
    return {{"y", linear(xs.front()) * scale}, {"which", which}};
  }
  void forward(int) {}
};
TORCH_MODULE(Pairs);

/// Takes what an LSTM returns.
struct UnpackedImpl : nn::Module {
  at::Tensor forward(const std::tuple<at::Tensor, std::tuple<at::Tensor, at::Tensor>>& value) { return std::get<0>(value); }
};
TORCH_MODULE(Unpacked);

static_assert(HasForward<PairsImpl> && HasForward<nn::SequentialImpl> && HasForward<nn::LinearImpl>);
static_assert(!HasForward<nn::ModuleListImpl> && !HasForward<nn::ModuleDictImpl> && !HasForward<nn::Module>);

TEST(Call, CastsInputsAndOutputsOfAnyShape) {
  with_ranks(2, [](const Communicator& world) {
    Pairs pairs;
    fully_shard(pairs, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    std::string out;
    const auto result = call(pairs, std::vector{input()}, at::ones({2}, at::kLong), 2.0, &out);
    EXPECT_EQ(pairs->seen, at::kBFloat16);
    EXPECT_EQ(pairs->index, at::kLong);
    EXPECT_EQ(out, "seen");
    EXPECT_EQ(result.at("y").scalar_type(), at::kFloat);
    EXPECT_EQ(result.at("which").scalar_type(), at::kLong);
    EXPECT_EQ(pairs->phase, "Pairs");
    EXPECT_EQ(forward_phase(), std::nullopt);
    call(pairs, 1);  // a forward that returns nothing
  });
}

TEST(Call, TrainsAsTheSameCastsByHand) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net(), narrow = seeded_net();
    fully_shard(net, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    narrow->to(at::kBFloat16);
    const auto y = call(net, input()), expected = narrow->forward(input().to(at::kBFloat16)).to(at::kFloat);
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(y, expected));
    y.pow(2).sum().backward();
    expected.pow(2).sum().backward();
    EXPECT_TRUE(at::equal(full_grad(net->b->weight), narrow->b->weight.grad().to(at::kFloat)));
  });
}

TEST(Call, CastsNestedOutputs) {
  with_ranks(2, [](const Communicator& world) {
    nn::LSTM lstm(nn::LSTMOptions(6, 4));
    fill_with_numbers(*lstm);
    fully_shard(lstm, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16, .output_dtype = at::kFloat}});
    const auto [y, state] = call(lstm, numbers({3, 2, 6}));
    EXPECT_EQ(y.scalar_type(), at::kFloat);
    EXPECT_EQ(std::get<1>(state).scalar_type(), at::kFloat);
    const auto again = call(lstm, numbers({3, 2, 6}), std::optional(state));  // a nested input
    (std::get<0>(again).sum() + y.sum()).backward();
    EXPECT_TRUE(full_grad(lstm->named_parameters()["weight_hh_l0"]).isfinite().all().item<bool>());
  });
}

TEST(Call, LeavesInputsAloneIfAskedTo) {
  with_ranks(1, [](const Communicator& world) {
    Pairs pairs;
    fully_shard(pairs, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16, .cast_forward_inputs = false}});
    std::string out;
    const auto result = call(pairs, std::vector{input()}, at::ones({2}, at::kLong), 2.0, &out);
    EXPECT_EQ(pairs->seen, at::kFloat);
    EXPECT_EQ(result.at("y").scalar_type(), at::kBFloat16);  // the operator has cast it
  });
}

TEST(Call, CastsAlsoWhereAllParametersAreInInnerUnits) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    EXPECT_EQ(call(net, input()).scalar_type(), at::kDouble);
    auto policy = seeded_net();
    fully_shard(policy, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}}, wrap_classes({"Linear"}));
    EXPECT_EQ(call(policy, input()).scalar_type(), at::kDouble);  // the inner units are called by the model itself
  });
}

TEST(Call, IsAPlainCallForOtherModules) {
  const auto net = std::make_shared<NetImpl>();
  EXPECT_EQ(call(net, input()).scalar_type(), at::kFloat);
  EXPECT_EQ(forward_phase(), std::nullopt);
}

TEST(Call, IsNeededWhereOptionsActAtTheBoundary) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    EXPECT_THAT(message_of<UsageError>([&] { net(input()); }),
                AllOf(HasSubstr("output_dtype of Net"), HasSubstr("tessera::call(module, x...)"), HasSubstr("FullyShardedDataParallel")));
    call(net, input()).sum().backward();  // backward uses the parameters outside of any call
    const auto whole = full_params(*net);
    EXPECT_TRUE(at::equal(net->a->weight, seeded_net()->a->weight));
  });
}

TEST(Call, IsNeededAlsoWhereInnerUnitsHaveAllParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world, .mixed_precision = {.cast_forward_inputs = false, .output_dtype = at::kDouble}});
    EXPECT_THAT(message_of<UsageError>([&] { net(input()); }),
                AllOf(HasSubstr("output_dtype of Net"), HasSubstr("tessera::call(module, x...)")));
    call(net, input()).sum().backward();
    EXPECT_EQ(call(net->a, input()).scalar_type(), at::kFloat);  // an inner unit by itself
  });
}

struct CallsInner : nn::Module {
  nn::Linear inner = register_module("inner", nn::Linear(6, 6));
  at::Tensor forward(const at::Tensor& x) { return call(inner, x); }
};

TEST(Call, SaysOnceThatAnInnerCallIsNoneOfTheWhole) {
  std::vector<std::string> lines;
  auto before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<CallsInner>();
    fill_with_numbers(*model);
    fully_shard(model->inner, {.mesh = world});
    fully_shard(model, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    EXPECT_EQ(call(model, input()).scalar_type(), at::kDouble);
    for (int i = 0; i < 2; i++) EXPECT_EQ(model->forward(input()).scalar_type(), at::kFloat);
  });
  set_log_sink(std::move(before));
  const auto said = HasSubstr("CallsInner was called plainly: its output_dtype does nothing");
  EXPECT_THAT(lines, ElementsAre(said, said));  // one line from each rank
}

TEST(Call, IsNeededAlsoOfTheSecondOfTwoModulesWhoseParametersAreInInnerUnits) {
  with_ranks(2, [](const Communicator& world) {
    auto one = sharded_net(world), other = sharded_net(world);
    const std::vector<std::shared_ptr<nn::Module>> both = {one.ptr(), other.ptr()};
    fully_shard(both, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    for (auto net : {one, other}) {
      EXPECT_EQ(call(net, input()).scalar_type(), at::kDouble);
      EXPECT_THAT(message_of<UsageError>([&] { net->forward(input()); }), HasSubstr("output_dtype of Net+Net"));
    }
  });
}

TEST(Call, ReachesReplicatedParameters) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}, .replicated = {net->b->bias}});
    EXPECT_EQ(call(net, input()).scalar_type(), at::kDouble);
    EXPECT_THAT(message_of<UsageError>([&] { net(input()); }), HasSubstr("output_dtype of Net"));
  });
}

TEST(Call, TakesTheAddressOfAModuleThatIsOwned) {
  with_ranks(2, [](const Communicator& world) {
    nn::ModuleList list(seeded_net());
    fully_shard(list[0], {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    EXPECT_EQ(call(list[0]->as<Net>(), input()).scalar_type(), at::kDouble);
    EXPECT_THAT(message_of<UsageError>([&] { call(list[0]->as<Pairs>(), 1); }), HasSubstr("given no module"));
    NetImpl unowned;
    EXPECT_THAT(message_of<UsageError>([&] { call(&unowned, input()); }), HasSubstr("no shared_ptr owns"));
  });
}

TEST(Call, IsWhatAHolderDoesIfItIsAskedTo) {
  with_ranks(2, [](const Communicator& world) {
    Called<Net> net = seeded_net().ptr();
    fully_shard(net, {.mesh = world, .mixed_precision = {.output_dtype = at::kDouble}});
    EXPECT_EQ(net(input()).scalar_type(), at::kDouble);
  });
}

TEST(Call, SeesTheModulesInASequential) {
  with_ranks(2, [](const Communicator& world) {
    const auto make = [] {
      nn::Sequential model(nn::Linear(6, 6), nn::Tanh(), nn::Linear(6, 6), nn::LSTM(6, 4), Unpacked());
      fill_with_numbers(*model);
      return model;
    };
    auto model = make(), plain = make();
    activation::checkpoint_module(model->ptr<nn::LinearImpl>(0));
    const auto inner = model->ptr<nn::LinearImpl>(2);
    fully_shard(inner, {.mesh = world, .mixed_precision = {.output_dtype = at::kFloat}});
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { model->forward(input()); }), HasSubstr("activation checkpointing of Linear"));
    const auto x = input().unsqueeze(0);
    const auto y = call(model, x), expected = plain->forward(x);
    EXPECT_TRUE(at::equal(y, expected));
    y.sum().backward();
    expected.sum().backward();
    EXPECT_TRUE(at::equal(full_grad(inner->weight), plain->ptr<nn::LinearImpl>(2)->weight.grad()));
  });
}

TEST(Call, EndsItsPhaseWhenForwardThrows) {
  auto net = seeded_net();
  EXPECT_ANY_THROW(call(net, at::ones({1, 1})));
  EXPECT_EQ(forward_phase(), std::nullopt);
}

TEST(Call, RefusesDtypesWithoutFractions) {
  with_ranks(1, [](const Communicator& world) {
    auto net = seeded_net();
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .mixed_precision = {.output_dtype = at::kInt}}); }),
                HasSubstr("output_dtype is Int"));
    EXPECT_THAT(message_of<UsageError>([&] { fully_shard(net, {.mesh = world, .mixed_precision = {.buffer_dtype = at::kLong}}); }),
                HasSubstr("buffer_dtype is Long"));
  });
}

}  // namespace
}  // namespace tessera::testing::call_test
