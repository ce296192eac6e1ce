// Python resumes runs that Tessera has written, and Tessera resumes runs that Python has written: PyTorch's FSDP, and Accelerate's
// load_state and save_state.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/full_params.h"
#include "tessera/train/trainer.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::run_python_test {
namespace {

using checkpoint::Format;
using ::testing::HasSubstr;

using State = std::map<std::string, at::Tensor>;

/// The same run as in run_files.py.
struct NetRun {
  Net net;
  std::unique_ptr<optim::AdamW> own;
  std::unique_ptr<torch::optim::AdamW> theirs;

  enum class Kind { Own, Torch };
  NetRun(const Communicator& world, Kind kind) {
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.copy_(numbers(parameter.sizes()));
    }
    for (const auto& child : net->children()) fully_shard(child, {.mesh = world});
    if (kind == Kind::Own) {
      own = std::make_unique<optim::AdamW>(parameters(*net), optim::AdamWOptions{.lr = 0.05, .weight_decay = 0.02});
    } else {
      theirs = std::make_unique<torch::optim::AdamW>(parameters(*net), torch::optim::AdamWOptions(0.05).weight_decay(0.02));
    }
  }

  void train(int first, int last) {
    for (int step = first; step < last; step++) {
      net->forward(numbers({3, 6}) + 0.25 * step).pow(2).mean().backward();
      own ? own->step() : static_cast<void>(theirs->step());
      own ? own->zero_grad() : theirs->zero_grad();
    }
  }
  checkpoint::Contents contents() {
    checkpoint::Contents result{.model = net.ptr().get()};
    result.optimizer = own ? checkpoint::OptimizerRef(own.get()) : checkpoint::OptimizerRef(theirs.get());
    return result;
  }
};

void expect_near(const State& state, const nlohmann::json& expected) {
  for (const auto& [name, tensor] : state) {
    const auto values = expected.at(name).get<std::vector<double>>();
    EXPECT_TRUE(at::allclose(tensor.flatten().to(at::kDouble), at::tensor(values, at::kDouble), 1e-5, 1e-6)) << name;
  }
}

/// A Trainer with two parameter groups: weights decay, biases do not.
struct GroupsRun {
  Trainer trainer;
  Net net;
  std::unique_ptr<optim::AdamW> optimizer;

  GroupsRun(const Communicator& world, std::map<std::string, std::string> settings)
      : trainer({.world = world, .settings = std::move(settings)}) {
    {
      const torch::NoGradGuard no_grad;
      for (auto& parameter : net->parameters()) parameter.copy_(numbers(parameter.sizes()));
    }
    trainer.prepare(net);
    std::vector<optim::ParameterGroup> groups = {{.parameters = {}, .weight_decay = 0.1}, {.parameters = {}, .weight_decay = 0.0}};
    for (const auto& [name, parameter] : named_parameters(*net)) groups[name.ends_with("bias") ? 1 : 0].parameters.push_back(parameter);
    optimizer = std::make_unique<optim::AdamW>(std::move(groups), optim::AdamWOptions{.lr = 0.05});
    trainer.prepare(*optimizer, optim::LearningRate{.base = 0.05});
  }

  void train(int first, int last) {
    for (int step = first; step < last; step++) {
      trainer.backward(net->forward(numbers({3, 6}) + 0.25 * step).pow(2).mean());
      trainer.step();
    }
  }
};

const std::map<std::string, std::map<std::string, std::string>> kTrainers = {
    {"sharded", {{"fsdp_state_dict_type", "SHARDED_STATE_DICT"}}},
    {"full", {{"fsdp_state_dict_type", "FULL_STATE_DICT"}}},
    {"replicated", {{"distributed_type", "MULTI_CPU"}, {"tessera_checkpoint_format", "accelerate"}}},
};

TEST(Runs, GoOnInPythonAndHere) {
  const Folder folder;
  State after, after_groups;
  std::filesystem::create_directory(folder / "ours");
  with_ranks(3, [&](const Communicator& world) {
    NetRun run(world, NetRun::Kind::Own);
    run.train(0, 2);
    auto contents = run.contents();
    contents.notes = {{"step", 5},
                      {"epoch", 3},
                      {"scheduler.last_epoch", 2},
                      {"scheduler._step_count", 3},
                      {"scheduler._last_lr", "[0.05]"},
                      {"scheduler.base_lrs", "[0.05]"}};
    checkpoint::save(folder / "native", contents, world);
    checkpoint::save(folder / "ours/dcp", contents, world, {.format = Format::Dcp});
    run.train(2, 3);
    if (auto state = full_state(*run.net); world.is_first()) after = std::move(state);
  });
  std::filesystem::create_directory(folder / "ours");
  for (const auto& [kind, settings] : kTrainers) {
    with_ranks(2, [&](const Communicator& world) {
      GroupsRun run(world, settings);
      run.train(0, 2);
      run.trainer.save_state(folder / "ours" / ("trainer_" + kind));
      run.train(2, 3);
      if (auto state = full_state(*run.net); world.is_first()) after_groups = std::move(state);
    });
  }
  const checkpoint::Notes settings = {{"lr", 0.05}, {"weight_decay", 0.02}};
  const auto sharded =
      checkpoint::convert(folder / "native", folder / "ours/sharded", {.to = Format::Accelerate, .world = 2, .settings = settings});
  EXPECT_THAT(sharded.left_out.at("epoch"), HasSubstr("no place"));
  checkpoint::convert(
      folder / "native", folder / "ours/full",
      {.to = Format::Accelerate, .world = 2, .accelerate_layout = checkpoint::AccelerateLayout::Full, .settings = settings});

  const auto [status, output] = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/run_files.py", folder.path()});
  ASSERT_EQ(status, 0) << output;
  const bool has_accelerate = output.find("accelerate\n") != std::string::npos;
  const auto json_in = [&](const std::string& name) { return nlohmann::json::parse(read_file(folder / name)); };
  std::vector<std::string> all = {"dcp"};
  if (has_accelerate) all.insert(all.end(), {"sharded", "full"});
  for (const auto& name : all) {
    SCOPED_TRACE("ours in Python: " + name);
    const auto read = json_in("read_" + name + ".json");
    expect_near(after, read["tensors"]);
    EXPECT_EQ(read["lr"], 0.05);
    EXPECT_EQ(read["betas"], nlohmann::json({0.9, 0.999}));
  }
  if (has_accelerate) {
    checkpoint::convert(folder / "native", folder / "weights", {.to = Format::Hub});
    EXPECT_TRUE(checkpoint::diff(folder / "merged", folder / "weights").is_none());
  }

  const auto expected = json_in("theirs/after.json")["tensors"];
  all.insert(all.end(), {"full.pt", "names.pt", "app", "state", "run"});
  for (const auto& name : all) {
    for (const auto kind : {NetRun::Kind::Own, NetRun::Kind::Torch}) {
      SCOPED_TRACE("theirs here: " + name);
      with_ranks(3, [&](const Communicator& world) {
        NetRun run(world, kind);
        run.train(0, 1);
        auto contents = run.contents();
        checkpoint::load(folder / "theirs" / name, contents, world);
        EXPECT_THAT(contents.notes.at("optimizer.param_groups").text(), HasSubstr("\"lr\":0.05"));
        if (name == "names.pt") return;  // this file is of another run, so the rest does not apply
        run.train(2, 3);
        expect_near(full_state(*run.net), expected);
      });
    }
    auto converted = "converted-" + name;
    std::ranges::replace(converted, '.', '-');
    checkpoint::convert(folder / "theirs" / name, folder / converted, {.world = 2});
    EXPECT_TRUE(checkpoint::diff(folder / "theirs" / name, folder / converted).is_none()) << name;
  }
  EXPECT_EQ(checkpoint::read_run(folder / "theirs/full.pt").notes.front().at("epoch"), "3");
  EXPECT_EQ(checkpoint::read_run(folder / "theirs/dcp").notes.front().at("scheduler.gamma"), "0.5");
  const auto left_out = [&](const char* name) { return nlohmann::json::parse(checkpoint::inspect(folder / "theirs" / name))["left_out"]; };
  EXPECT_TRUE(left_out("dcp").contains("kind"));
  EXPECT_TRUE(left_out("numbers.pt").contains("optimizer.state"));

  EXPECT_THAT(message_of<UsageError>([&] {
                with_ranks(1, [&](const Communicator& world) {
                  NetRun run(world, NetRun::Kind::Own);
                  auto contents = run.contents();
                  checkpoint::load(folder / "theirs/numbers.pt", contents, world);
                });
              }),
              HasSubstr("knows the parameters by numbers only"));
  Net plain;
  checkpoint::load_weights(*plain, folder / "theirs/numbers.pt");

  for (const auto* name : {"app", "state", "run"}) {
    checkpoint::merge(folder / "theirs" / name, folder / ("merged-" + std::string(name)));
    checkpoint::merge(folder / "theirs/dcp", folder / "merged-dcp");
    EXPECT_TRUE(checkpoint::diff(folder / ("merged-" + std::string(name)), folder / "merged-dcp").is_none()) << name;
  }
  EXPECT_EQ(checkpoint::read_run(folder / "theirs/run").notes.front().at("epoch"), "3");

  for (const auto& [kind, trainer_settings] : kTrainers) {
    if (!has_accelerate) break;
    SCOPED_TRACE("a Trainer's, " + kind);
    const auto read = json_in("read_trainer_" + kind + ".json"), there = json_in("theirs/trainer_" + kind + ".json");
    expect_near(after_groups, read["tensors"]);
    for (const auto& [name, decay] : read["decays"].items()) EXPECT_EQ(decay, name.ends_with("bias") ? 0.0 : 0.1) << name;
    with_ranks(2, [&](const Communicator& world) {
      GroupsRun run(world, trainer_settings);
      run.trainer.load_state(folder / "theirs" / ("trainer_" + kind));
      EXPECT_EQ(run.trainer.steps(), 2);
      run.train(2, 3);
      expect_near(full_state(*run.net), there["tensors"]);
      // Python has resumed from a folder of Tessera, and saved after one more step.
      run.trainer.load_state(folder / "theirs" / ("trainer_" + kind + "_again"));
      EXPECT_EQ(run.trainer.steps(), 3);
      expect_near(full_state(*run.net), read["tensors"]);
    });
  }

  if (!has_accelerate) GTEST_SKIP() << "without Accelerate's folders: build/python has no package accelerate";
  const auto run = checkpoint::read_run(folder / "theirs/sharded");
  EXPECT_EQ(run.ranks, 2);
  EXPECT_EQ(run.optimizer, "torch::optim::AdamW");
  EXPECT_EQ(run.notes.at(1).at("step"), "5");
  EXPECT_EQ(run.notes.at(1).at("scheduler.gamma"), "0.5");
  EXPECT_EQ(run.notes.at(1).at("custom_checkpoint_0.counts"), "[1,2]");
  EXPECT_TRUE(run.catalog.left_out.contains("custom_checkpoint_0.object"));
  const checkpoint::CatalogReader stored(run.catalog);
  const auto drawn = at::rand({3}, *checkpoint::read_generator(stored, run, 1));
  EXPECT_TRUE(at::allclose(drawn.to(at::kDouble), at::tensor(json_in("theirs/draws.json").get<std::vector<double>>(), at::kDouble)));
  // Ranks, new ones included, draw the same numbers in every layout.
  checkpoint::convert(folder / "converted-sharded", folder / "replicated",
                      {.to = Format::Accelerate, .world = 2, .accelerate_layout = checkpoint::AccelerateLayout::Replicated});
  std::vector<at::Tensor> draws;
  for (const auto* name : {"theirs/sharded", "theirs/full", "converted-sharded", "replicated"}) {
    const auto each = checkpoint::read_run(folder / name);
    const checkpoint::CatalogReader reader(each.catalog);
    for (size_t rank = 0; rank < 5; rank++) {
      const auto numbers = at::rand({3}, *checkpoint::read_generator(reader, each, static_cast<int>(rank)));
      if (draws.size() == rank) draws.push_back(numbers);
      EXPECT_TRUE(at::equal(numbers, draws[rank])) << name << rank;
      for (size_t other = 0; other < rank; other++) EXPECT_FALSE(at::equal(draws[other], draws[rank])) << rank;
    }
  }
  EXPECT_EQ(checkpoint::format_of(folder / "theirs/plain"), Format::Accelerate);
  const auto plain_run = checkpoint::diff(folder / "theirs/plain", folder / "theirs/names.pt");
  EXPECT_TRUE(plain_run.different.empty() && plain_run.only_other.empty());
  EXPECT_EQ(plain_run.only_one, std::vector<std::string>{".generator.cpu"});
  // Converts to another format and back.
  checkpoint::convert(folder / "theirs/sharded", folder / "again",
                      {.to = Format::Accelerate, .world = 2, .accelerate_layout = checkpoint::AccelerateLayout::Full});
  EXPECT_TRUE(checkpoint::diff(folder / "theirs/sharded", folder / "again").is_none());
  EXPECT_EQ(checkpoint::read_run(folder / "again").notes, run.notes);
  checkpoint::convert(folder / "converted-sharded", folder / "kept", {.to = Format::Dcp});
  const auto settings_of = [](const checkpoint::Manifest& each) { return each.notes.front().at(checkpoint::kSettingsNote); };
  EXPECT_EQ(settings_of(checkpoint::read_run(folder / "kept")), settings_of(run));
}

}  // namespace
}  // namespace tessera::testing::run_python_test
