// A job that loses a rank, and then another, is started again each time with the ranks that are left, and resumes from its newest checkpoint.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <thread>

#include "tessera/base/process.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/prefix_lock.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/init.h"
#include "tessera/optim/adam.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::restart_test {
namespace {

using namespace std::chrono_literals;

constexpr int kSteps = 30, kRows = 12;

/// Trains on global batches that do not depend on the number of ranks. Each rank takes its part.
int train(const std::string& prefix) {
  const auto world = init({.operation_limit = 20s});
  const checkpoint::PrefixLock lock(prefix, world);
  auto net = sharded_net(world);
  optim::AdamW optimizer(net->parameters(), {.lr = 0.01});
  checkpoint::Contents contents{.model = net.get(), .optimizer = &optimizer};
  int step = 0;
  if (const auto newest = checkpoint::latest(prefix)) {
    checkpoint::load(*newest, contents, world);
    step = contents.notes.at("step").as<int>();
  }
  checkpoint::AsyncSaver saver(world);
  const int last = step + 8;
  while (step < kSteps) {
    const auto batch = numbers({kRows, 6}, step), own = batch.chunk(world.size())[static_cast<size_t>(world.rank())];
    net->forward(own).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
    contents.notes["step"] = ++step;
    saver.save(checkpoint::step_folder(prefix, step), contents, {.keep = checkpoint::Keep{.last = 3}});
    saver.poll();
    if (world.size() > 1 && step == last) std::this_thread::sleep_for(20s);  // until it is killed
  }
  return 0;
}

const ChildTask train_here("train on what is left", train);

Process start(const std::filesystem::path& prefix, const std::string& ranks) {
  return Process(launch(ranks, {this_program()}, {"--max-restarts", "2", "--min-ranks", "1"}), train_here.environment(prefix),
                 Process::Output::Capture);
}

int64_t newest_step(const std::filesystem::path& prefix) {
  const auto all = checkpoint::step_folders(prefix);
  return all.empty() ? 0 : all.back().step;
}

void kill_a_rank(const Process& launcher) {
  const auto id = std::to_string(launcher.pid());
  std::ifstream list("/proc/" + id + "/task/" + id + "/children");
  const std::vector<pid_t> ranks{std::istream_iterator<pid_t>(list), {}};
  ASSERT_FALSE(ranks.empty());
  ::kill(ranks.back(), SIGKILL);
}

Net weights_of(const std::filesystem::path& prefix) {
  auto net = seeded_net();
  checkpoint::load_weights(*net, checkpoint::step_folder(prefix, kSteps));
  return net;
}

TEST(Restart, GoesOnWithTheRanksThatAreLeft) {
  const Folder whole, broken;
  auto undisturbed = start(whole / "run", "1");
  ASSERT_EQ(undisturbed.wait(60s), 0) << undisturbed.read_output();
  auto job = start(broken / "run", "3");
  for (int loss = 0; loss < 2; loss++) {
    const auto begin = newest_step(broken / "run");
    for (int i = 0; i < 5000 && newest_step(broken / "run") < begin + 5; i++) std::this_thread::sleep_for(2ms);
    ASSERT_GE(newest_step(broken / "run"), begin + 5);
    kill_a_rank(job);
  }
  const auto said = job.read_output();
  ASSERT_EQ(job.wait(60s), 0) << said;
  EXPECT_THAT(said, ::testing::HasSubstr("attempt 3 of 3 begins\nlaunch: 1 rank on"));
  const auto expected = weights_of(whole / "run"), found = weights_of(broken / "run");
  for (const auto& item : expected->named_parameters()) {
    EXPECT_TRUE(at::allclose(found->named_parameters()[item.key()], item.value(), 1e-4, 1e-5)) << item.key();
  }
}

}  // namespace
}  // namespace tessera::testing::restart_test
