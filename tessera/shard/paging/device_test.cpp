// The demands of a lazily traced device on the core, as numbered in docs/mechanism.md. They are tested on the silent device, whose
// memory can't be read and whose tensors have the values of all ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/library.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/base/tied.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/activation.h"
#include "tessera/shard/buffers.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/norms.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/schedule/unit_state.h"
#include "tessera/shard/training.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"
#include "tests/testing/silent_device.h"
#include "tests/testing/tracing_transport.h"

namespace tessera::testing::device_test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

/// A batch for each rank.
std::vector<at::Tensor> batches() {
  std::vector<at::Tensor> result;
  for (int r = 0; r < kReplicas; r++) result.push_back(input().add(0.3 * r).sin());
  return result;
}

/// The same net as sharded_net, moved to the device first, with the whole model as the last unit.
Net net_on_device(const ShardOptions& options) {
  auto net = seeded_net();
  move_to_silent_device(*net);
  const auto reads = host_reads();
  for (const auto& child : net->children()) fully_shard(child, options);
  fully_shard(net, options);
  EXPECT_EQ(host_reads(), reads);
  return net;
}

Net net_on_device(const Mesh& mesh, const MixedPrecision& precision = {}) {
  return net_on_device(ShardOptions{.mesh = mesh, .mixed_precision = precision});
}

class Device : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { silent_device(); }

  const TracingWorld traced_ = tracing_world();
  const Communicator& world_ = traced_.world;
  Trace& trace_ = *traced_.trace;
  const at::Tensor batch_ = upload(batches());
};

using Step = std::function<void()>;
using MakeStep = std::function<Step(const std::vector<at::Tensor>& parameters)>;  // makes an optimizer

struct Run {
  std::vector<std::vector<double>> losses;  // of each step, of each rank
  std::vector<at::Tensor> parameters;       // whole, as rank 0 has them
};

/// Trains. The same source serves as one program for all ranks, and as the program of one rank.
void train(Net net, const at::Tensor& batch, const MakeStep& make_step, double max_norm, std::vector<at::Tensor>& losses) {
  const auto shards = parameters(*net);
  const auto step = make_step(shards);
  for (int i = 0; i < 5; i++) {
    const auto loss = at::cross_entropy_loss(net(batch), batch.argmax(1).remainder(4));
    loss.backward();
    if (max_norm > 0) clip_grad_norm(shards, max_norm);
    step();
    for (const auto& shard : shards) shard.mutable_grad() = at::Tensor();
    losses.push_back(loss.detach());
  }
}

Run train_on_threads(const MakeStep& make_step, double max_norm) {
  Run run;
  run.losses.assign(5, std::vector<double>(kReplicas));
  with_ranks(kReplicas, [&](const Communicator& world) {
    auto net = sharded_net(world);
    fully_shard(net, {.mesh = world});
    std::vector<at::Tensor> losses;
    const auto rank = static_cast<size_t>(world.rank());
    train(net, batches()[rank], make_step, max_norm, losses);
    for (size_t i = 0; i < losses.size(); i++) run.losses[i][rank] = losses[i].item<double>();
    std::vector<at::Tensor> whole;
    for (const auto& shard : parameters(*net)) whole.push_back(full_parameter(shard));
    if (rank == 0) run.parameters = whole;
  });
  return run;
}

Run train_on_device(const Mesh& mesh, const at::Tensor& batch, const MakeStep& make_step, double max_norm) {
  auto net = net_on_device(mesh);
  const auto reads = host_reads();
  std::vector<at::Tensor> losses;
  train(net, batch, make_step, max_norm, losses);
  EXPECT_EQ(host_reads(), reads) << "the core asked the device for a value inside a step (demand 6)";
  Run run;
  for (const auto& loss : losses) {
    auto& step = run.losses.emplace_back();
    for (const auto& value : mesh.world().replicas(loss)) step.push_back(value.item<double>());
  }
  for (const auto& shard : parameters(*net)) {
    const auto values = download(full_parameter(shard));
    for (const auto& value : values) EXPECT_TRUE(at::equal(value, values.front()));
    run.parameters.push_back(values.front());
  }
  return run;
}

/// The same to the bit, unless a tolerance is given.
void expect_same(const Run& actual, const Run& expected, double tolerance) {
  ASSERT_EQ(actual.losses.size(), expected.losses.size());
  for (size_t i = 0; i < actual.losses.size(); i++) {
    for (size_t r = 0; r < kReplicas; r++) EXPECT_NEAR(actual.losses[i][r], expected.losses[i][r], tolerance) << "step " << i;
  }
  ASSERT_EQ(actual.parameters.size(), expected.parameters.size());
  for (size_t i = 0; i < actual.parameters.size(); i++) {
    EXPECT_LE((actual.parameters[i] - expected.parameters[i]).abs().max().item<double>(), tolerance) << "parameter " << i;
  }
}

template <class Optimizer, class Options>
MakeStep steps_of(Options options) {
  return [options](const std::vector<at::Tensor>& shards) -> Step {
    return [optimizer = std::make_shared<Optimizer>(shards, options)] { optimizer->step(); };
  };
}

// --- The device itself ---

TEST_F(Device, CannotBeReadByTheHost) {
  EXPECT_DEATH((void)*static_cast<const volatile float*>(batch_.const_data_ptr<float>()), "");
  const auto reads = host_reads();
  EXPECT_EQ(batch_.sum().item<float>(), batches()[0].sum().item<float>());
  EXPECT_TRUE(at::equal(batch_.cpu(), batches()[0]));
  EXPECT_FALSE(at::equal(batch_, batch_.add(1)));
  EXPECT_EQ(host_reads(), reads + 3);
}

// --- Training: demands 1, 4, 5, 6 and 8 at once ---

TEST_F(Device, TrainsToTheBitAsThreadsDo) {
  for (const auto& make : {steps_of<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9)),
                           steps_of<torch::optim::AdamW>(torch::optim::AdamWOptions(0.01))}) {
    expect_same(train_on_device(world_, batch_, make, 0), train_on_threads(make, 0), 0);
  }
}

TEST_F(Device, TrainsWithFusedOptimizers) {
  // The fused kernels round the end of a tensor differently from its middle, and shards end at other values here.
  for (const auto& make :
       {steps_of<optim::SGD>(optim::SgdOptions{.lr = 0.1, .momentum = 0.9}), steps_of<optim::AdamW>(optim::AdamWOptions{.lr = 0.01})}) {
    expect_same(train_on_device(world_, batch_, make, 0), train_on_threads(make, 0), 1e-5);
  }
}

TEST_F(Device, ClipsAsThreadsDo) {
  const auto make = steps_of<optim::SGD>(optim::SgdOptions{.lr = 0.3});
  const auto clipped = train_on_device(world_, batch_, make, 0.05);
  expect_same(clipped, train_on_threads(make, 0.05), 1e-5);
  EXPECT_GT(std::abs(clipped.losses.back()[0] - train_on_threads(make, 0).losses.back()[0]), 1e-3) << "the clipping did nothing";
}

TEST_F(Device, KnowsTheNormOfNoGradients) {
  auto net = net_on_device(world_);
  EXPECT_EQ(clip_grad_norm(parameters(*net), 1).item<float>(), 0);
}

struct WordsImpl : torch::nn::Module {
  torch::nn::Embedding words = register_module("words", torch::nn::Embedding(7, 6));
  torch::nn::LayerNorm norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({6})));
  at::Tensor forward(const at::Tensor& ids) { return norm(words(ids)).matmul(words->weight.t()).log_softmax(-1).select(-1, 2); }
};
TORCH_MODULE(Words);

TEST_F(Device, TrainsEmbeddingsNormsAndWeightsThatAreUsedTwice) {
  torch::manual_seed(3);
  Words words;
  torch::manual_seed(3);
  Words sharded;
  std::vector<at::Tensor> ids;
  for (int r = 0; r < kReplicas; r++) {
    ids.push_back(at::arange(r, r + 4));
    words(ids.back()).mean().div(kReplicas).backward();
  }
  move_to_silent_device(*sharded);
  fully_shard(sharded->norm, {.mesh = world_});
  fully_shard(sharded, {.mesh = world_});
  sharded->forward(upload(ids)).mean().backward();
  for (const auto& item : sharded->named_parameters()) {
    const auto expected = words->named_parameters()[item.key()].grad();
    EXPECT_TRUE(at::allclose(full_grad(item.value()).cpu(), expected, 1e-5, 1e-7)) << item.key();
  }
}

TEST_F(Device, TrainsInRowsAndColumns) {
  const auto make = steps_of<optim::SGD>(optim::SgdOptions{.lr = 0.1});
  const Mesh mesh(world_, {.replicate = 2, .shard = 2});
  expect_same(train_on_device(mesh, batch_, make, 0), train_on_threads(make, 0), 1e-5);
}

TEST_F(Device, TrainsInMixedPrecision) {
  auto net = net_on_device(world_, {.param_dtype = at::kBFloat16});
  net(batch_).sum().backward();
  for (const auto& call : trace_.of(Operation::AllGather)) EXPECT_EQ(call.pieces, 2);
  for (const auto& shard : parameters(*net)) {
    EXPECT_EQ(shard.scalar_type(), at::kFloat);
    EXPECT_EQ(shard.grad().scalar_type(), at::kFloat);
  }
}

// --- Demand 2 ---

TEST_F(Device, ViewsDoNotFault) {
  auto net = net_on_device(world_);
  const auto& weight = net->a->weight;
  const auto transposed = weight.t();
  const auto flat = weight.view({-1}).narrow(0, 3, 5).unsqueeze(0);
  EXPECT_EQ(counters(*net).gathers, 0);
  EXPECT_THAT(trace_.of(Operation::AllGather), SizeIs(0));
  flat.add(1);
  EXPECT_EQ(counters(*net).gathers, 1);
}

// --- Demand 3 ---

TEST_F(Device, GathersAreTiedToTheOtherOperands) {
  auto net = net_on_device(world_);
  net(batch_).sum().backward();  // the order of use is not known yet
  trace_.calls.clear();
  net(batch_).sum().backward();
  const auto gathers = trace_.of(Operation::AllGather);
  // Forward: the input of each layer. Backward: the gradient that the layer's weight multiplies.
  ASSERT_EQ(gathers.size(), 4);
  const std::vector<std::string> units = {"a", "b", "c", "b"};
  const std::vector<std::vector<int64_t>> operands = {{3, 6}, {3, 10}, {3, 10}, {3, 10}};
  for (size_t i = 0; i < gathers.size(); i++) {
    EXPECT_EQ(gathers[i].unit, units[i]);
    EXPECT_EQ(gathers[i].pieces, 2) << "weight and bias: one call for a unit (demand 4)";
    ASSERT_EQ(gathers[i].operands.size(), 1) << "gather " << i;
    EXPECT_EQ(gathers[i].operands[0].sizes, operands[i]) << "gather " << i;
  }
  for (const auto& call : trace_.of(Operation::ReduceScatter)) EXPECT_EQ(call.pieces, 2);
}

/// The gathers of a step whose order of uses is known: each unit with the sizes of the tensors to which it is tied.
std::vector<std::pair<std::string, std::vector<std::vector<int64_t>>>> gathers_of_a_step(Trace& trace, Net net, const at::Tensor& batch) {
  for (int step = 0; step < 3; step++) {
    trace.calls.clear();
    net(batch).sum().backward();
  }
  std::vector<std::pair<std::string, std::vector<std::vector<int64_t>>>> all;
  for (const auto& gather : trace.of(Operation::AllGather)) {
    auto& tied = all.emplace_back(gather.unit, std::vector<std::vector<int64_t>>()).second;
    for (const auto& operand : gather.operands) tied.push_back(operand.sizes);
  }
  return all;
}

TEST_F(Device, GathersAheadAreTiedToTheOperandsOfTheUnitBefore) {
  using Gathers = std::vector<std::pair<std::string, std::vector<std::vector<int64_t>>>>;
  EXPECT_EQ(gathers_of_a_step(trace_, net_on_device({.mesh = world_, .schedule = {.prefetch_depth = 1}}), batch_),
            (Gathers{{"a", {{3, 6}}}, {"b", {{3, 6}}}, {"c", {{3, 10}}}, {"b", {{3, 4}}}}));
}

TEST_F(Device, GathersAreTiedOnlyWhereBarriersAreWanted) {
  using Gathers = std::vector<std::pair<std::string, std::vector<std::vector<int64_t>>>>;
  EXPECT_EQ(gathers_of_a_step(trace_, net_on_device({.mesh = world_, .schedule = {.tracing = {.barrier_in_forward = false}}}), batch_),
            (Gathers{{"a", {}}, {"b", {}}, {"c", {}}, {"b", {{3, 10}}}}));
  EXPECT_EQ(gathers_of_a_step(trace_, net_on_device({.mesh = world_, .schedule = {.tracing = {.barrier_in_backward = false}}}), batch_),
            (Gathers{{"a", {{3, 6}}}, {"b", {{3, 10}}}, {"c", {{3, 10}}}, {"b", {}}}));
}

struct Tied {
  std::vector<int64_t> value;
  size_t after;
};
std::vector<Tied>& ties_of_a_step() {
  static std::vector<Tied> all;
  return all;
}

TEST_F(Device, BackwardIsTiedToTheGradientsOfTheUnitBeforeTheLast) {
  const auto ties_of = [&](const TracingOptions& tracing) {
    auto net = net_on_device({.mesh = world_, .schedule = {.tracing = tracing}});
    const auto input = batch_.clone().set_requires_grad(true);
    net(input).sum().backward();
    net->zero_grad();  // so that no pass adds to these gradients, which would need them at once
    set_tie(input.device().type(), [](std::vector<at::Tensor> values, std::span<const at::Tensor> after) {
      for (const auto& value : values) ties_of_a_step().push_back({value.sizes().vec(), after.size()});
      return values;
    });
    net(input).sum().backward();
    net->zero_grad();  // so that no pass adds to these gradients, which would need them at once
    set_tie(input.device().type(), nullptr);
    return std::exchange(ties_of_a_step(), {});
  };
  // Of 'c', 'b' and 'a' in backward: the gradient that the weight of 'a' multiplies waits for those of 'c', weight and bias.
  const auto ties = ties_of({});
  ASSERT_EQ(ties.size(), 1);
  EXPECT_EQ(ties[0].value, (std::vector<int64_t>{3, 10}));
  EXPECT_EQ(ties[0].after, 2);
  EXPECT_THAT(ties_of({.barrier_in_backward = false}), IsEmpty());
}

TEST_F(Device, AnEqualOperandInItsPlaceKeepsItsGradient) {
  auto net = net_on_device(world_);
  const auto leaf = batch_.clone().set_requires_grad(true);
  const auto out = net(leaf);
  EXPECT_FALSE(trace_.calls.front().operands.at(0).in_its_place.expired()) << "the layer should have saved it for its backward";
  out.sum().backward();
  const auto expected = batches()[2].set_requires_grad(true);
  seeded_net()->forward(expected).sum().backward();
  ASSERT_TRUE(leaf.grad().defined());
  EXPECT_TRUE(at::equal(download(leaf.grad())[2], expected.grad()));
}

// --- Demand 5 ---

TEST_F(Device, NobodyMayAskForTheRank) {
  EXPECT_THAT(message_of<UsageError>([&] { (void)world_.rank(); }), HasSubstr("local_ranks()"));
  EXPECT_EQ(world_.local_ranks().size(), kReplicas);
  auto net = net_on_device(world_);
  for (const auto& parameter : units(*net).front()->groups().front().parameters) {
    EXPECT_EQ(parameter.shard.numel(), 15) << "60 values over 4 ranks";
  }
}

TEST_F(Device, WritesOfWholeParametersReachTheShardsOfAllRanks) {
  auto net = net_on_device(world_);
  {
    const auto whole = full_params(*net, Access::Write);
    const torch::NoGradGuard no_grad;
    net->b->bias.copy_(at::arange(10));
  }
  const auto shard = net->b->named_parameters()["bias"];
  EXPECT_EQ(shard.numel(), 3);
  EXPECT_TRUE(at::equal(download(shard)[2], at::tensor({6.F, 7.F, 8.F})));
  EXPECT_TRUE(at::equal(download(shard)[3], at::tensor({9.F, 0.F, 0.F}))) << "padding included";
  EXPECT_TRUE(at::equal(full_parameter(shard).cpu(), at::arange(10).to(at::kFloat)));
}

TEST_F(Device, GivesItsWholeStateToTheFirstRank) {
  auto net = net_on_device(world_);
  auto expected = seeded_net()->named_parameters();
  const auto state = full_state(*net, Ranks::First);
  EXPECT_EQ(state.size(), expected.size());
  for (const auto& [name, value] : state) EXPECT_TRUE(at::equal(value.cpu(), expected[name])) << name;
}

TEST_F(Device, SynchronizesBuffers) {
  torch::nn::Module module;
  const auto buffer = module.register_buffer("buffer", upload(batches()));
  sync_buffers(module, world_, BufferSync::Mean);
  EXPECT_TRUE(at::allclose(download(buffer)[3], at::stack(batches()).mean(0)));
}

// --- Demand 6: also without gradients units are freed ---

TEST_F(Device, UnitsAreFreedInEvaluation) {
  auto net = net_on_device(world_);
  uint64_t all = 0;
  for (const auto& unit : units(*net)) all += unit->memory().unsharded_bytes(unit->buffers());
  const torch::NoGradGuard no_grad;
  const auto reads = host_reads();
  for (int pass = 0; pass < 3; pass++) net(batch_);
  EXPECT_EQ(host_reads(), reads);
  EXPECT_LT(counters(*net).peak_unsharded_bytes, all);
  int whole = 0;
  for (const auto& unit : units(*net)) {
    const auto held = unit->schedule()->lock();
    whole += unit->state(held).has_memory() ? 1 : 0;
  }
  EXPECT_LE(whole, ShardOptions{.mesh = world_}.schedule.max_live_units);
}

// --- Demand 7 ---

TEST_F(Device, HearsOfTheEndOfAStep) {
  auto net = net_on_device(world_);
  trace_.steps_done = 0;  // making each unit has ended a step
  optim::SGD optimizer(parameters(*net), {.lr = 0.1});
  for (int step = 1; step <= 2; step++) {
    net(batch_).sum().backward();
    optimizer.step();
    EXPECT_EQ(trace_.steps_done, step - 1) << "if the step ended here, gradients would be results of the program";
    optimizer.zero_grad();
    EXPECT_EQ(trace_.steps_done, step);
    optimizer.zero_grad();
    EXPECT_EQ(trace_.steps_done, step);
  }
}

TEST_F(Device, EndsAProgramWithEachUnitThatIsMade) {
  net_on_device({.mesh = world_, .schedule = {.tracing = {.cuts_after_sharding = false}}});
  EXPECT_EQ(trace_.steps_done, 0);
  net_on_device(world_);
  EXPECT_EQ(trace_.steps_done, 4) << "three layers, and the model";
}

TEST_F(Device, EndsAProgramAfterBackwardIfThatIsWanted) {
  auto net = net_on_device({.mesh = world_, .schedule = {.tracing = {.cuts_after_backward = true}}});
  trace_.steps_done = 0;
  optim::SGD optimizer(parameters(*net), {.lr = 0.1});
  net(batch_).sum().backward();
  EXPECT_EQ(trace_.steps_done, 1);
  optimizer.step();
  optimizer.zero_grad();
  EXPECT_EQ(trace_.steps_done, 2);
}

// --- Demand 8 ---

TEST_F(Device, BackwardRunsOnAnotherThread) {
  auto net = net_on_device(world_);
  net(batch_).sum().backward();
  const auto here = std::this_thread::get_id();
  EXPECT_EQ(trace_.of(Operation::AllGather).front().thread, here);
  const auto reductions = trace_.of(Operation::ReduceScatter);
  EXPECT_THAT(reductions, SizeIs(3));
  for (const auto& call : reductions) EXPECT_NE(call.thread, here);
}

// --- What the core tells its user ---

TEST_F(Device, RefusesAndDescribesAsElsewhere) {
  auto net = net_on_device(world_);
  net(batch_).sum().backward();
  EXPECT_THAT(message_of<c10::Error>([&] { (void)net->a->weight.const_data_ptr(); }), HasSubstr("unit 'a'"));
  EXPECT_THAT(message_of<UsageError>([&] { (void)parameters(*net).front().norm(); }), HasSubstr("clip_grad_norm"));
  EXPECT_THAT(describe(*net), HasSubstr("\nb "));
}

TEST_F(Device, RunsCheckpointedSegmentsAgainWithoutReadingThem) {
  const auto gradients = [&](const auto& forward) {
    auto net = net_on_device(world_);
    const auto reads = host_reads();
    forward(net).pow(2).sum().backward();
    EXPECT_EQ(host_reads(), reads);
    std::vector<at::Tensor> result;
    for (const auto& shard : parameters(*net)) {
      for (const auto& gradient : download(shard.grad())) result.push_back(gradient);
    }
    return result;
  };
  const auto plain = gradients([&](Net& net) { return net(batch_); });
  const auto again =
      gradients([&](Net& net) { return activation::checkpoint([net](const at::Tensor& x) mutable { return net(x); }, batch_); });
  ASSERT_EQ(plain.size(), again.size());
  for (size_t i = 0; i < plain.size(); i++) EXPECT_TRUE(at::equal(plain[i], again[i]));
}

TEST_F(Device, WatchesTheThreadThatRunsABackwardPassInsideOfASegment) {
  const auto gradients = [&](bool checkpoints) {
    auto net = net_on_device(world_);
    // A force: the gradient of an energy, of which in turn a gradient is wanted.
    const auto force = [&net](const at::Tensor& x) {
      const auto at = x * 2;
      return torch::autograd::grad({net(at).sin().sum()}, {at}, {}, true, true)[0].exp();
    };
    const auto x = batch_.detach().clone().set_requires_grad(true);
    (checkpoints ? activation::checkpoint(force, x) : force(x)).sum().backward();
    std::vector<at::Tensor> result = download(x.grad());
    for (const auto& shard : parameters(*net)) {
      if (!shard.grad().defined()) continue;
      for (const auto& gradient : download(shard.grad())) result.push_back(gradient);
    }
    return result;
  };
  const auto plain = gradients(false), again = gradients(true);
  ASSERT_EQ(plain.size(), again.size());
  ASSERT_GT(plain.size(), 1 + kReplicas);
  for (size_t i = 0; i < plain.size(); i++) EXPECT_TRUE(at::equal(plain[i], again[i])) << i;
}

int fused_calls = 0;

TEST_F(Device, FusedKernelOfTheDeviceOnAShardIsRefusedUnlessItGoesValueByValue) {
  auto net = net_on_device(Mesh(world_));
  const auto shard = parameters(*net).front();
  const torch::NoGradGuard no_grad;  // kernels below return what they get, which would become its own node of autograd
  EXPECT_NO_THROW(at::_foreach_add(std::vector{shard}, 1));  // made of additions here
  torch::Library library(torch::Library::IMPL, "aten", c10::DispatchKey::PrivateUse1, __FILE__, __LINE__);
  // The first two are made of other operators on the CPU, and the third does not exist there.
  library.impl("_foreach_add.Scalar", [](at::TensorList tensors, const at::Scalar&) {
    fused_calls++;
    return tensors.vec();
  });
  library.impl("_foreach_norm.Scalar", [](at::TensorList tensors, const at::Scalar&, std::optional<at::ScalarType>) {
    fused_calls++;
    return tensors.vec();
  });
  library.impl("batch_norm_stats", [](const at::Tensor& x, double) {
    fused_calls++;
    return std::tuple(x, x);
  });
  const auto words = HasSubstr("would be the result of this rank alone");
  EXPECT_NO_THROW(at::_foreach_add(std::vector{shard}, 1));
  EXPECT_EQ(std::exchange(fused_calls, 0), 1);
  EXPECT_THAT(message_of<UsageError>([&] { (void)at::_foreach_norm(std::vector{shard}); }), words);
  EXPECT_THAT(message_of<UsageError>([&] { at::batch_norm_stats(shard, 0.1); }), words);
  EXPECT_EQ(fused_calls, 0);
  at::batch_norm_stats(batch_, 0.1);
  EXPECT_EQ(fused_calls, 1);
}

}  // namespace
}  // namespace tessera::testing::device_test
