// The class FullyShardedDataParallel: training, options, metadata, printed text and errors.
#include "tessera/shard/fully_sharded.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/tracing_transport.h"

namespace tessera::testing::fully_sharded_test {
namespace {

namespace nn = torch::nn;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string refused(const Communicator& world, FullyShardedOptions options) {
  return message_of<UsageError>([&] { FullyShardedDataParallel(seeded_net(), world, std::move(options)); });
}

/// Fills a module with values that are the same on all ranks.
template <class M>
M filled(M module) {
  fill_with_numbers(*module);
  return module;
}

struct Outer : nn::Module {
  FullyShardedDataParallel<nn::Linear> inner;
  nn::Linear head{nullptr};
  explicit Outer(const Communicator& world) : inner(filled(nn::Linear(6, 6)), world) {
    register_module("inner", inner.ptr());
    head = register_module("head", filled(nn::Linear(6, 2)));
  }
  at::Tensor forward(const at::Tensor& x) { return head(torch::tanh(inner(x))); }
};

TEST(FullySharded, TrainsAsReplicated) {
  with_ranks(3, [](const Communicator& world) {
    auto reference = seeded_net();
    FullyShardedDataParallel sharded(seeded_net(), world);
    optim::SGD optimizer(sharded.parameters(), {.lr = 0.1});
    torch::optim::SGD plain(reference->parameters(), 0.1);
    for (int step = 0; step < 3; step++) {
      sharded(input(world.rank())).pow(2).sum().backward();
      const auto norm = sharded.clip_grad_norm_(1.0);
      optimizer.step();
      optimizer.zero_grad();
      mean_over_ranks(world, [&](int rank) { return reference(input(rank)).pow(2).sum(); }).backward();
      EXPECT_NEAR(norm.item<double>(), nn::utils::clip_grad_norm_(reference->parameters(), 1.0), 1e-4);
      plain.step();
      plain.zero_grad();
    }
    EXPECT_TRUE(at::allclose(full_parameter(sharded->b->weight), reference->b->weight, 1e-5, 1e-6));
  });
}

TEST(FullySharded, IsAHandleOfItsModule) {
  with_ranks(2, [](const Communicator& world) {
    const auto net = seeded_net();
    FullyShardedDataParallel sharded(net, world);
    EXPECT_EQ(&*sharded, net.get());
    EXPECT_EQ(sharded.ptr(), net.ptr());
    EXPECT_EQ(sharded.module().get(), net.get());
    EXPECT_EQ(sharded->a->options.out_features(), 10);
    EXPECT_TRUE(sharded.params_with_grad().empty());
    const auto copy = sharded;
    copy.forward(input()).sum().backward();
    EXPECT_EQ(sharded.params_with_grad().size(), 6U);

    auto layers = filled(nn::Sequential(nn::Linear(6, 3), nn::ReLU()));
    const FullyShardedDataParallel sequential(layers, world);
    EXPECT_EQ(sequential[1]->name(), layers[1]->name());
    EXPECT_EQ(sequential(input()).size(1), 3);

    const FullyShardedDataParallel pointed(filled(std::make_shared<NetImpl>()), world);
    EXPECT_EQ(pointed(input()).size(1), 4);
  });
}

TEST(FullySharded, KeepsItsNamesInAnOuterModel) {
  with_ranks(2, [](const Communicator& world) {
    const FullyShardedDataParallel model(std::make_shared<Outer>(world), world);
    std::vector<std::string> names;
    for (const auto& [name, shard] : model.get_original_names_and_sharded_parameters()) {
      names.push_back(name);
      EXPECT_TRUE(shard_info(shard));
    }
    EXPECT_THAT(names, ElementsAre("inner.weight", "inner.bias", "head.weight", "head.bias"));
    model(input()).sum().backward();
    EXPECT_EQ(model.params_with_grad().size(), 4U);
    const auto metadata = model.get_shard_metadata();
    EXPECT_EQ(metadata.shard_info.at("inner")[0].name, "weight");
    EXPECT_EQ(metadata.shard_info.at("inner")[0].original_name, "inner.weight");
    EXPECT_EQ(metadata.shard_info.at("Outer")[1].original_size, std::vector<int64_t>{2});
    EXPECT_EQ(metadata.world_size, 2);
    EXPECT_EQ(metadata.rank, world.rank());
  });
}

TEST(FullySharded, DescribesFlatParametersAndCastBuffers) {
  with_ranks(2, [](const Communicator& world) {
    nn::Sequential layers(nn::Linear(6, 3), nn::BatchNorm1d(3));
    const FullyShardedDataParallel model(layers, world, {.flatten_parameters = true, .compute_dtype = at::kBFloat16});
    EXPECT_EQ(model.parameters().size(), 1U);
    const auto metadata = model.get_shard_metadata();
    EXPECT_THAT(metadata.flatten_info.at("flat_param_0").names, ElementsAre("0.weight", "0.bias", "1.weight", "1.bias"));
    EXPECT_THAT(metadata.flatten_info.at("flat_param_0").numels, ElementsAre(18, 3, 3, 3));
    EXPECT_EQ(metadata.buffer_info.at("1.running_mean"), at::kFloat);
    EXPECT_FALSE(metadata.buffer_info.contains("1.num_batches_tracked"));
    EXPECT_THAT(metadata.to_json(), AllOf(HasSubstr(R"("1.running_mean":{"_orig_dtype":"Float"})"),
                                          HasSubstr(R"("shapes":[[3,6],[3],[3],[3]])"), HasSubstr(R"("world_size":2)")));
  });
}

TEST(FullySharded, PrintsItsOptionsAndTheModule) {
  with_ranks(1, [](const Communicator& world) {
    std::ostringstream out;
    out << FullyShardedDataParallel(nn::Linear(6, 3), world, {.compute_dtype = at::kHalf});
    EXPECT_THAT(out.str(), AllOf(HasSubstr("world_size=1, rank=0, compute_dtype=Half, buffer_dtype=Half, flatten_parameters=false, "
                                           "reshard_after_forward=true, sharding_groups=None\n"),
                                 HasSubstr("(module): torch::nn::Linear(in_features=6")));
    const FullyShardedDataParallel inner(nn::Linear(6, 3), world);
    nn::Sequential model(inner.module(), nn::Linear(3, 3));
    const FullyShardedDataParallel outer(model, world);
    std::ostringstream root;
    root << outer << inner;
    EXPECT_THAT(root.str(), AllOf(HasSubstr("reshard_after_forward=false"), HasSubstr("reshard_after_forward=true")));
    std::ostringstream resharded;
    resharded << FullyShardedDataParallel(nn::Sequential(inner.module()), world, {.disable_reshard_on_root = false});
    EXPECT_THAT(resharded.str(), HasSubstr("reshard_after_forward=true"));
  });
}

TEST(FullySharded, ComputesInTheComputeDtype) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto dtype : {at::kFloat, at::kHalf, at::kBFloat16}) {
      FullyShardedDataParallel model(seeded_net(), world, {.compute_dtype = dtype, .fp32_reduce_scatter = true});
      const auto y = model(input());
      EXPECT_EQ(y.scalar_type(), dtype);
      y.sum().backward();
      EXPECT_EQ(model.params_with_grad().front().grad().scalar_type(), at::kFloat);
    }
  });
}

TEST(FullySharded, DividesRowsIfAskedTo) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto& options : {FullyShardedOptions{.shard_param_on_dim_0 = true}, FullyShardedOptions{.on_neuron = true}}) {
      const FullyShardedDataParallel model(nn::Linear(6, 3), world, options);
      EXPECT_EQ(shard_info(model->weight)->ranges[0].numel, world.rank() == 0 ? 12 : 6);
    }
  });
}

TEST(FullySharded, WrapsInsideByAPolicy) {
  with_ranks(2, [](const Communicator& world) {
    const FullyShardedDataParallel model(seeded_net(), world, {.auto_wrap_policy = wrap_classes({"Linear"})});
    model(input()).sum().backward();
    EXPECT_EQ(counters(*model).reductions, 3U);
  });
}

TEST(FullySharded, ShardsInGroups) {
  with_ranks(4, [](const Communicator& world) {
    const auto own = world.rank() % 2;
    const FullyShardedOptions options{.sharding_groups = {{0, 2}, {1, 3}}, .sharding_rank = world.rank() / 2, .sharding_world_size = 2};
    const auto net = seeded_net();
    const FullyShardedDataParallel inner(net->a, world, options);
    const FullyShardedDataParallel model(net, world, options);
    EXPECT_EQ(model.world().size(), 2);
    EXPECT_EQ(model.world().rank(), world.rank() / 2);
    EXPECT_TRUE(model.world().same_group(inner.world()));
    auto reference = seeded_net();
    model(input(world.rank())).sum().backward();
    ((reference(input(own)).sum() + reference(input(own + 2)).sum()) / 2).backward();  // the mean over the group alone
    EXPECT_TRUE(at::allclose(full_grad(model->b->weight), reference->b->weight.grad()));
    const auto norm = model.clip_grad_norm_(1e9, 2, options.sharding_groups);
    EXPECT_NEAR(norm.item<double>(), nn::utils::clip_grad_norm_(reference->parameters(), 1e9), 1e-4);
    EXPECT_THAT(message_of<UsageError>([&] {
                  model.clip_grad_norm_(1e9, 2, {{0, 1, 2, 3}});
                }),
                HasSubstr("among the ranks that shard together, [[0, 2], [1, 3]], and can't add them among [[0, 1, 2, 3]]"));
  });
}

TEST(FullySharded, SimulatesTheGroupForDummyCollectives) {
  with_ranks(2, [](const Communicator& world) {
    const FullyShardedDataParallel model(
        seeded_net(), world, {.debug_dummy_all_gather_op = true, .debug_dummy_all_reduce_op = true, .debug_dummy_reduce_scatter_op = true});
    EXPECT_EQ(model.world().traits().name, "fake");
    EXPECT_EQ(model.world().size(), 2);
    if (world.rank() == 0) model(input()).sum().backward();  // waits for no other rank
    EXPECT_EQ(world.traffic(Operation::AllGather).calls, 0U);
  });
}

TEST(FullySharded, SumsParametersInADummyForward) {
  with_ranks(2, [](const Communicator& world) {
    const FullyShardedDataParallel model(seeded_net(), world, {.debug_dummy_forward_pass = true});
    const auto sum = model(input());
    auto expected = input().mean();
    const auto net = seeded_net();
    for (const auto& parameter : net->parameters()) expected = expected + parameter.mean();
    EXPECT_NEAR(sum.item<double>(), expected.item<double>(), 1e-5);
    sum.backward();
    EXPECT_EQ(model.params_with_grad().size(), 6U);
  });
}

TEST(FullySharded, LogsItsCallsIfAskedTo) {
  std::vector<std::string> lines;
  auto before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  const auto level = set_log_level(LogLevel::Info);
  with_ranks(1, [](const Communicator& world) {
    const FullyShardedDataParallel model(seeded_net(), world, {.debug_msg = "first", .debug_print = true});
    model(input());
  });
  set_log_level(level);
  set_log_sink(std::move(before));
  std::erase_if(lines, [](const std::string& line) { return !line.starts_with("first (Net): "); });
  EXPECT_THAT(lines, ElementsAre(HasSubstr("wraps 6 parameters"), AllOf(HasSubstr("forward begins"), HasSubstr("MB in memory")),
                                 HasSubstr("forward ends")));
}

TEST(FullySharded, RefusesModulesThatItCanNotWrap) {
  with_ranks(1, [](const Communicator& world) {
    const auto net = seeded_net();
    const FullyShardedDataParallel once(net, world);
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel<FullyShardedDataParallel<Net>>(once, world); }),
                HasSubstr("can't wrap a module twice"));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel(net, world); }),
                HasSubstr("can't wrap a module twice, and this Net"));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel(nn::ModuleList(nn::Linear(1, 1)), world); }),
                HasSubstr("can't wrap a ModuleList, because it has no forward"));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel(std::shared_ptr<NetImpl>(), world); }),
                HasSubstr("empty shared_ptr"));
    auto wide = seeded_net();
    wide->b->to(at::kDouble);
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel(wide, world); }),
                AllOf(HasSubstr("'b.weight' is Double"), HasSubstr("float32 parameters only")));
    nn::Linear elsewhere(1, 1);
    elsewhere->weight = elsewhere->register_parameter("other", at::ones({1}, at::kMeta));
    EXPECT_THAT(message_of<UsageError>([&] { FullyShardedDataParallel(elsewhere, world); }),
                AllOf(HasSubstr("'other' is on meta"), HasSubstr("communicate on " + world.traits().device.str())));
  });
}

TEST(FullySharded, RefusesOptionsThatItCanNotKeep) {
  with_ranks(4, [](const Communicator& world) {
    EXPECT_THAT(refused(world, {.compute_dtype = at::kDouble}), HasSubstr("compute_dtype must be Float, Half or BFloat16, not Double"));
    EXPECT_THAT(refused(world, {.buffer_dtype = at::kLong}), HasSubstr("buffer_dtype must be Float, Half or BFloat16, not Long"));
    EXPECT_THAT(refused(world, {.execute_sharding_on_init = false}), HasSubstr("execute_sharding_on_init can't be false"));
    EXPECT_THAT(refused(world, {.flatten_parameters = true, .on_neuron = true}), HasSubstr("flatten_parameters"));
    EXPECT_THAT(refused(world, {.optimization_barrier_in_forward = true}), HasSubstr("optimization_barrier_in_forward is for engines"));
    EXPECT_THAT(refused(world, {.optimization_barrier_in_backward = false}), HasSubstr("optimization_barrier_in_backward is for"));
    EXPECT_THAT(refused(world, {.mark_step_on_finalization = true}), HasSubstr("transport threads runs each operation at once"));
    EXPECT_THAT(refused(world, {.pin_layout_in_all_reduce = true}), HasSubstr("pin_layout_in_all_reduce"));
    EXPECT_THAT(refused(world, {.pin_layout_in_all_gather = true}), HasSubstr("pin_layout_in_all_gather"));
    EXPECT_THAT(refused(world, {.pin_layout_in_reduce_scatter = true}), HasSubstr("pin_layout_in_reduce_scatter"));
    EXPECT_THAT(refused(world, {.debug_dummy_all_gather_op = true}), HasSubstr("set all three, or none"));
    const FullyShardedDataParallel pair(std::make_shared<Outer>(world), world, {.debug_dummy_optimization_barrier_op = true});
    const FullyShardedDataParallel lstm(nn::LSTM(2, 2), world, {.debug_dummy_forward_pass = true});
    EXPECT_THAT(message_of<UsageError>([&] { lstm(at::ones({1, 1, 2})); }), HasSubstr("debug_dummy_forward_pass returns one tensor"));
  });
}

TEST(FullySharded, RefusesGroupsThatMakeNoSense) {
  with_ranks(4, [](const Communicator& world) {
    using Groups = std::vector<std::vector<int>>;
    const auto with = [&](const Groups& groups, std::optional<int> rank, std::optional<int> size) {
      return refused(world, {.sharding_groups = groups, .sharding_rank = rank, .sharding_world_size = size});
    };
    const Groups pairs = {{0, 1}, {2, 3}};
    EXPECT_THAT(with(pairs, std::nullopt, 2), HasSubstr("needs sharding_rank and sharding_world_size"));
    EXPECT_THAT(with(pairs, 0, std::nullopt), HasSubstr("needs sharding_rank and sharding_world_size"));
    EXPECT_THAT(with(pairs, 1 - world.rank() % 2, 2), HasSubstr("does not agree with the sharding_groups"));
    EXPECT_THAT(with({}, world.rank(), 2), HasSubstr("does not agree with the world"));
    EXPECT_THAT(with({{0, 1}, {2}}, 0, 2), HasSubstr("[[0, 1], [2]] lack rank 3"));
    EXPECT_THAT(with({{0, 1}, {1, 2, 3}}, 0, 2), HasSubstr("have rank 1 twice"));
    EXPECT_THAT(with({{0, 1}, {2, 4}}, 0, 2), HasSubstr("name rank 4, which is not in a world of 4"));
    EXPECT_THAT(with({{1, 0}, {2, 3}}, 0, 2), HasSubstr("have [1, 0] out of order"));
  });
}

TEST(FullySharded, TakesWhatATracingEngineDoes) {
  const auto world = tracing_world().world;
  const auto message = [&](FullyShardedOptions options) { return refused(world, std::move(options)); };
  EXPECT_THAT(message({.pin_layout_in_all_gather = true}), HasSubstr("pin_layout_in_all_gather can't be true on transport tracing: layouts"));
  EXPECT_THAT(message({.shard_param_on_dim_0 = true}), HasSubstr("shard_param_on_dim_0 (on_neuron) can't be set on transport tracing"));
  // All other options are accepted: the error is that of the next check.
  EXPECT_THAT(message({.optimization_barrier_in_forward = false,
                       .optimization_barrier_in_backward = false,
                       .mark_step_on_finalization = true,
                       .pin_layout_in_all_reduce = false,
                       .debug_dummy_optimization_barrier_op = true}),
              HasSubstr("the ranks communicate on"));
}

}  // namespace
}  // namespace tessera::testing::fully_sharded_test
