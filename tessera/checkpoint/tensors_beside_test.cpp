// Tests of extra tensors that a program saves with its model: Contents::tensors and Contents::tensors_by_rank.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/run_program.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::tensors_beside_test {
namespace {

using checkpoint::Contents;
using checkpoint::Format;
using ::testing::AllOf;
using ::testing::HasSubstr;

using Tensors = std::map<std::string, at::Tensor>;

/// Returns the rows [begin, end) of a replay buffer. Row r of all ranks together begins with 3 r.
at::Tensor replay(int64_t begin, int64_t end) {
  return at::arange(begin * 3, end * 3, at::kDouble).view({end - begin, 3});
}

/// Returns tensors that are the same on all ranks: among them a scalar, an empty one, and one whose values are in another memory order.
Tensors statistics(double factor = 1) {
  return {{"stats.mean", factor * numbers({2, 3}).t()},
          {"stats.count", at::full({}, static_cast<int64_t>(7 * factor), at::kLong)},
          {"stats.none", at::empty({0, 4})},
          {"mask", (factor * numbers({5})).gt(0)}};
}

Contents all_of(const PictureRun& run, Tensors tensors, Tensors by_rank) {
  auto all = contents(run, {{"step", 3}});
  all.tensors = std::move(tensors);
  all.tensors_by_rank = std::move(by_rank);
  return all;
}

/// A run of two ranks, of which the second has one more row of the replay buffer.
void save_two(const std::filesystem::path& folder) {
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 1);
    const int rank = world.rank();
    checkpoint::save(
        folder,
        all_of(run, statistics(),
               {{"replay.states", rank == 0 ? replay(0, 3) : replay(3, 7)}, {"replay.next", at::full({}, 10 + rank, at::kInt)}}),
        world);
  });
}

void expect_equal(const Tensors& actual, const Tensors& expected) {
  for (const auto& [name, tensor] : expected) {
    EXPECT_EQ(actual.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(same_values(actual.at(name), tensor)) << name;
  }
}

/// Expects that the extra tensors in a checkpoint load on the ranks that saved, on other ranks, and as a whole.
void expect_loads(const std::filesystem::path& folder) {
  SCOPED_TRACE(folder.string());
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, 0.25);
    const int rank = world.rank();
    const auto mean = at::zeros({3, 2}), states = at::zeros({rank == 0 ? 3 : 4, 3}, at::kDouble), next = at::zeros({}, at::kInt);
    auto into = contents(run);
    into.tensors = {{"stats.mean", mean}, {"stats.count", {}}, {"stats.none", at::empty({0, 4})}, {"mask", {}}};
    into.tensors_by_rank = {{"replay.states", states}, {"replay.next", next}};
    checkpoint::load(folder, into, world);
    expect_equal(into.tensors, statistics());
    EXPECT_TRUE(at::equal(mean, statistics().at("stats.mean")));  // in place
    EXPECT_TRUE(at::equal(states, rank == 0 ? replay(0, 3) : replay(3, 7)));
    EXPECT_EQ(next.item<int>(), 10 + rank);
  });
  for (const int ranks : {1, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      const PictureRun run(world, shard_nested, 0.25);
      const int64_t begin = 7 * world.rank() / ranks, end = 7 * (world.rank() + 1) / ranks;
      auto into = all_of(run, statistics(0), {{"replay.states", at::zeros({3, end - begin}, at::kDouble).t()}});
      checkpoint::load(folder, into, world);
      expect_equal(into.tensors, statistics());
      EXPECT_TRUE(at::equal(into.tensors_by_rank.at("replay.states"), replay(begin, end)));
    });
  }
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, 0.25);
    auto into = all_of(run, {{"replay.states", {}}, {"replay.next", at::zeros({2}, at::kInt)}}, {});
    checkpoint::load(folder, into, world);
    expect_equal(into.tensors, {{"replay.states", replay(0, 7)}, {"replay.next", torch::tensor({10, 11}, at::kInt)}});
  });
}

TEST(TensorsBeside, AreLoadedOnAnyNumberOfRanksFromEachFormatThatHasThem) {
  const Folder folder;
  save_two(folder / "a");
  const checkpoint::Notes settings = {{"lr", 0.1}};
  checkpoint::convert(folder / "a", folder / "dcp", {.to = Format::Dcp, .world = 3, .settings = settings});
  checkpoint::convert(folder / "a", folder / "a.pt", {.to = Format::Torch, .settings = settings, .memory = 20});
  checkpoint::reshard(folder / "a", folder / "three", 3);
  checkpoint::reshard(folder / "dcp", folder / "back", 2);
  for (const auto* name : {"a", "dcp", "a.pt", "three", "back"}) {
    expect_loads(folder / name);
    auto found = checkpoint::diff(folder / "a", folder / name);
    std::erase_if(found.only_one, [&](const auto& left) {  // generators, which these formats do not hold
      return left == checkpoint::kHiddenGeneratorName ? name == std::string("a.pt") : left.starts_with(checkpoint::kGeneratorPrefix);
    });
    EXPECT_TRUE(found.is_none()) << name << ": " << checkpoint::to_table(found);
    EXPECT_TRUE(checkpoint::verify(folder / name).faults.empty()) << name;
    EXPECT_TRUE(nlohmann::json::parse(checkpoint::inspect(folder / name))["left_out"].empty()) << name;
  }
  EXPECT_EQ(nlohmann::json::parse(checkpoint::inspect(folder / "a"))["tensors"][".tensors.replay.states"]["shape"], nlohmann::json({7, 3}));
  if (!std::filesystem::exists(TESSERA_TEST_PYTHON)) return;
  constexpr auto kScript = R"(
import sys, torch, torch.distributed.checkpoint as dcp
folder = sys.argv[1]
run = torch.load(folder + '/a.pt')
sgd = {'state': {'weight': {'momentum_buffer': torch.ones(2, 3)}}, 'param_groups': [{'lr': 0.1, 'params': ['weight']}]}
replay = {'states': torch.arange(14.).view(7, 2), 'queue': [torch.ones(2), torch.zeros(1)]}
dcp.save({'app': {'model': {'weight': torch.ones(2, 3)}, 'optim': sgd, 'replay': replay, 'epoch': 3}}, checkpoint_id=folder + '/theirs')
there = {'replay.states': torch.zeros(7, 3, dtype=torch.float64), 'stats.mean': torch.zeros(3, 2), 'mask': torch.zeros(5, dtype=torch.bool)}
dcp.load(there, checkpoint_id=folder + '/dcp')
for found in (run, there):
    assert torch.equal(found['replay.states'], torch.arange(21, dtype=torch.float64).view(7, 3))
    assert torch.equal(found['stats.mean'], run['stats.mean']) and found['stats.mean'].abs().sum() > 0
    assert torch.equal(found['mask'], run['mask'])
assert run['stats.count'].item() == 7 and run['replay.next'].tolist() == [10, 11] and run['stats.none'].shape == (0, 4)
)";
  const auto [status, output] = run_program({TESSERA_TEST_PYTHON, "-c", kScript, folder.path()});
  ASSERT_EQ(status, 0) << output;
  checkpoint::reshard(folder / "theirs", folder / "theirs-resharded", 2);
  for (const auto* name : {"theirs", "theirs-resharded"}) {
    with_ranks(2, [&](const Communicator& world) {
      torch::nn::Linear linear(torch::nn::LinearOptions(3, 2).bias(false));
      fully_shard(linear, {.mesh = world});
      const auto states = at::zeros({world.rank() == 0 ? 4 : 3, 2});
      Contents into{.model = linear.get(),
                    .tensors = {{"replay.queue.0", {}}, {"replay.queue.1", at::ones({1})}},
                    .tensors_by_rank = {{"replay.states", states}}};
      checkpoint::load(folder / name, into, world);
      expect_equal(into.tensors, {{"replay.queue.0", at::ones({2})}, {"replay.queue.1", at::zeros({1})}});
      EXPECT_TRUE(at::equal(states, at::arange(14.F).view({7, 2}).slice(0, world.rank() == 0 ? 0 : 4, world.rank() == 0 ? 4 : 7)));
      EXPECT_EQ(into.notes.at("epoch").as<int>(), 3);
    });
  }
}

TEST(TensorsBeside, AreCopiedByAnAsyncSave) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    const auto count = at::zeros({2}), own = at::full({2}, world.rank());
    checkpoint::AsyncSaver saver(world);
    saver.save(folder / "a", all_of(run, {{"count", count}}, {{"own", own}}));
    count.fill_(5);
    own.fill_(5);
    saver.wait();
    auto into = all_of(run, {{"count", count}}, {{"own", own}});
    checkpoint::load(folder / "a", into, world);
    EXPECT_EQ(count.sum().item<double>(), 0);
    EXPECT_EQ(own.sum().item<double>(), 2 * world.rank());
  });
}

TEST(TensorsBeside, AreRefusedByNameWhereTheyCantBeSaved) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    const int rank = world.rank();
    const auto one = at::ones({2});
    const auto message = [&](Tensors tensors, Tensors by_rank) {
      return message_of<Error>([&] { checkpoint::save(folder / "a", all_of(run, std::move(tensors), std::move(by_rank)), world); });
    };
    EXPECT_THAT(message({{"same", one}, {"mean", rank * one}}, {}),
                AllOf(HasSubstr("must be the same on all ranks, but "), HasSubstr("rank 0: 'mean' Float of [2] with checksum "),
                      HasSubstr("tensors_by_rank")));
    EXPECT_THAT(message(rank == 0 ? Tensors{{"mean", one}} : Tensors{}, {}), HasSubstr("rank 1: no 'mean'"));
    EXPECT_THAT(message({}, {{"queue", rank == 0 ? at::ones({2, 3}) : at::ones({2, 4})}}), HasSubstr("'queue' by rank Float of rows [3]"));
    EXPECT_THAT(message({}, {{"queue", rank == 0 ? one : one.to(at::kLong)}}), HasSubstr("Long of rows []"));
    EXPECT_THAT(message({{"mean", rank == 0 ? at::Tensor() : one}}, {}), HasSubstr("the tensor 'mean' is undefined"));  // on all ranks
    EXPECT_THAT(message({{"mean", one.to_sparse()}}, {}), HasSubstr("'mean' is sparse"));
    EXPECT_THAT(message({{"weight", run.model->conv->weight}}, {}), HasSubstr("'weight' is a sharded parameter"));
    EXPECT_THAT(message({{"mean", one}}, {{"mean", one}}), HasSubstr("'mean' is in Contents::tensors and in"));
    EXPECT_THAT(message({{"step", one}}, {}), HasSubstr("a note are both called 'step'"));
    EXPECT_THAT(message({{"a\xff", one}}, {}), HasSubstr("of an extra tensor is not UTF-8"));
    EXPECT_THAT(message({{"a\nb", at::Tensor()}}, {}), HasSubstr("the tensor 'a\\x0ab' is undefined"));
    for (const auto* name : {"", "model", "model.w", "optimizer.state", "generator.cpu"})
      EXPECT_THAT(message({{name, one}}, {}), HasSubstr(fmt::format("can't be called '{}'", name)));
    EXPECT_FALSE(std::filesystem::exists(folder / "a"));
    EXPECT_THAT(message_of<UsageError>([&] {
                  checkpoint::save(folder / "b", all_of(run, {{"mean", one}}, {}), world, {.format = checkpoint::Format::Accelerate});
                }),
                HasSubstr("no place for the extra tensor 'mean'"));
    // An extra tensor may have the name of a parameter.
    checkpoint::save(folder / "a", all_of(run, {{"conv.weight", one}}, {}), world);
    auto into = all_of(run, {{"conv.weight", at::zeros({2})}}, {});
    checkpoint::load(folder / "a", into, world);
    EXPECT_TRUE(at::equal(into.tensors.at("conv.weight"), one));
  });
}

TEST(TensorsBeside, AreRefusedByNameWhereTheyDontFit) {
  const Folder folder;
  save_two(folder / "a");
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, 0.25);
    const auto before = full_state(*run.model);
    const int rank = world.rank();
    const auto message = [&](Tensors tensors, Tensors by_rank) {
      auto into = all_of(run, std::move(tensors), std::move(by_rank));
      return message_of<Error>([&] { checkpoint::load(folder / "a", into, world); });
    };
    EXPECT_THAT(message({{"stats.mean", at::zeros({2, 3})}}, {}),
                HasSubstr("'stats.mean' is Float of [3, 2] there, but Float of [2, 3] here"));
    EXPECT_THAT(message({{"stats.mean", at::zeros({3, 2}, at::kDouble)}}, {}), HasSubstr("but Double of [3, 2] here"));
    EXPECT_THAT(message({{"stats.mode", {}}}, {}),
                AllOf(HasSubstr("'stats.mode' is not in it; the extra tensors in it are 'mask', "), HasSubstr("'replay.states'")));
    EXPECT_THAT(message({}, {{"replay.states", at::zeros({3, 3}, at::kDouble)}}),
                HasSubstr("'replay.states' of all ranks is Double of [7, 3] there, but Double of [6, 3] here"));
    EXPECT_THAT(message({}, {{"stats.count", at::zeros({}, at::kLong)}}), HasSubstr("is Long of [] there, but Long of [2] here"));
    EXPECT_THAT(message({}, {{"replay.states", {}}}), HasSubstr("the tensor 'replay.states' is undefined"));
    EXPECT_THAT(message({{"stats.mean", at::zeros({3, 1}).expand({3, 2})}}, {}), HasSubstr("in which several values share memory"));
    EXPECT_THAT(message(rank == 0 ? Tensors{{"mask", {}}} : Tensors{}, {}), HasSubstr("different extra tensors"));
    expect_same(full_state(*run.model), before);
  });
  with_ranks(3, [&](const Communicator& world) {  // a scalar by rank fits only the number of ranks that saved
    const PictureRun run(world, shard_nested, 0.25);
    auto into = all_of(run, {}, {{"replay.next", at::zeros({}, at::kInt)}});
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / "a", into, world); }),
                HasSubstr("'replay.next' of all ranks is Int of [2] there, but Int of [3] here"));
    into.tensors_by_rank["replay.next"].fill_(4);
    into.tensors["new"] = at::ones({1});
    checkpoint::LoadOptions options{.may_be_missing = {"new"}};
    into.tensors_by_rank.clear();
    checkpoint::load(folder / "a", into, world, options);
    EXPECT_EQ(into.tensors.at("new").item<double>(), 1);
  });
}

TEST(TensorsBeside, AreNamedWhereOnlyTheModelIsWritten) {
  const Folder folder;
  save_two(folder / "a");
  const checkpoint::Notes settings = {{"lr", 0.1}};
  for (const auto to : {Format::Hub, Format::Accelerate, Format::Safetensors}) {
    const auto done = checkpoint::convert(folder / "a", folder / fmt::format("to-{}", static_cast<int>(to)),
                                          {.to = to, .settings = to == Format::Accelerate ? settings : decltype(settings){}});
    for (const auto* name : {"mask", "replay.states", "replay.next", "stats.mean", "stats.count", "stats.none"})
      EXPECT_EQ(done.left_out.at(name), "it is an extra tensor outside the model");
  }
  std::vector<std::string> warnings;
  const auto sink = set_log_sink([&](const LogRecord& record) { warnings.emplace_back(record.text); });
  checkpoint::merge(folder / "a", folder / "merged");
  checkpoint::consolidate(folder / "a", folder / "a.safetensors");
  set_log_sink(sink);
  EXPECT_EQ(warnings.size(), 2);
  for (const auto& warning : warnings) EXPECT_THAT(warning, AllOf(HasSubstr("without its extra tensors"), HasSubstr("'mask'")));
  EXPECT_TRUE(checkpoint::diff(folder / "merged", folder / "a.safetensors").is_none());
  const auto plain = std::make_shared<Picture>(0.25);
  checkpoint::load_weights(*plain, folder / "a");
}

}  // namespace
}  // namespace tessera::testing::tensors_beside_test
