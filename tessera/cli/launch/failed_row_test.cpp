// A rank of two rows and two columns is killed, hangs, or leaves out a pass: all errors, and `tessera launch`, name it by its number in the
// world.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <map>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/process.h"
#include "tessera/comm/init.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/child_task.h"

namespace tessera::cli::failed_row_test {
namespace {

using namespace std::chrono_literals;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
using ::testing::Not;

/// Four ranks train, and rank 3 fails. It is rank 1 of its row and of its column.
int train(const std::string& trouble) {
  torch::manual_seed(1);
  const auto world = init({.operation_limit = 3s});
  torch::nn::Linear model(8, 8);
  fully_shard(model, {.mesh = Mesh(world, {.replicate = 2, .shard = 2})});
  optim::SGD optimizer(parameters(*model), {.lr = 0.1});
  for (int step = 0; step < 3; step++) {
    const auto is_in_trouble = [&](const std::string& what) { return step == 1 && world.rank() == 3 && trouble == what; };
    const auto come_to = [&](const std::string& place) {
      if (is_in_trouble("killed before " + place)) ::raise(SIGKILL);
      if (is_in_trouble("hangs before " + place)) std::this_thread::sleep_for(60s);
    };
    come_to("forward");
    const auto loss = model->forward(torch::ones({2, 8})).sum();
    come_to("backward");
    if (!is_in_trouble("without backward")) loss.backward();
    come_to("norm");
    if (!is_in_trouble("without backward")) optimizer.clip_grad_norm(1);
    come_to("step");
    optimizer.step();
    optimizer.zero_grad();
  }
  return 0;
}

const testing::ChildTask in_rows("train in rows", train);

struct Memory {
  const char *transport, *residence;
};
constexpr Memory kShared = {"shm", "node-shared"}, kGathered = {"shm", "gathered"}, kMessages = {"gloo", "gathered"};

std::string said_by_launch(const std::string& trouble, const Memory& memory) {
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  const std::map<std::string, std::string> variables = {{"TESSERA_TRANSPORT", memory.transport}, {"TESSERA_RESIDENCE", memory.residence}};
  Process launcher({tessera, "launch", "--nproc-per-node", "4", this_program()}, in_rows.environment(trouble, variables),
                   Process::Output::Capture);
  auto said = launcher.read_output();
  EXPECT_NE(launcher.wait(20s).value_or(0), 0);
  return said;
}

TEST(RankOfARow, ThatIsKilledIsNamedByAll) {
  const auto expect_named = [](const std::string& place, const Memory& memory) {
    SCOPED_TRACE(place + " over " + memory.transport + ", " + memory.residence);
    const auto said = said_by_launch("killed before " + place, memory);
    EXPECT_THAT(said, HasSubstr("launch: rank 3 was killed by signal 9"));
    EXPECT_THAT(said, HasSubstr("started again with --resume, or let launch restart it: --max-restarts N before the program"));
    EXPECT_THAT(said, ContainsRegex("rank 3 (\\(process [0-9]+\\) has died|has closed its connection or died)"));
    EXPECT_THAT(said, Not(ContainsRegex("rank [012] (\\(process [0-9]+\\) has died|has closed its connection or died|has left)")));
  };
  for (const std::string place : {"forward", "backward", "step"}) expect_named(place, kShared);
  for (const auto& memory : {kGathered, kMessages}) expect_named("norm", memory);
}

TEST(RankOfARow, ThatHangsIsNamedThoughOthersOnlyWait) {
  for (const auto& memory : {kShared, kGathered}) {
    const auto said = said_by_launch("hangs before backward", memory);
    EXPECT_THAT(said, HasSubstr("waited 3 s for rank 3 and gave up"));
    EXPECT_THAT(said, ContainsRegex("launch: rank [0-2] ended with status 3; it failed because of rank 3, which still ran"));
  }
}

// Its step fails, while the others only wait for it.
TEST(RankOfARow, ThatLeavesOutBackwardIsNamed) {
  const auto said = said_by_launch("without backward", kShared);
  EXPECT_THAT(said, HasSubstr("launch: rank 3 ended with status 3; its last words:\n  a step without gradients"));
  EXPECT_THAT(said, Not(ContainsRegex("rank [012] (has left|\\(process [0-9]+\\) has died)")));
}

}  // namespace
}  // namespace tessera::cli::failed_row_test
