// Jobs of which one rank or the launcher is killed at random moments, and which are started again each time until they are done: no
// checkpoint is lost, no process is left behind, and the result has the same bits as that of a job that was not disturbed.
#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>

#include <filesystem>
#include <fstream>
#include <random>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/process.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/prefix_lock.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/comm/init.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/picture.h"

namespace tessera::testing::kills_long_test {
namespace {

using namespace std::chrono_literals;

constexpr int kSteps = 30, kKills = 50;

int train(const std::string& prefix) {
  const auto world = init({.operation_limit = 20s});
  const checkpoint::PrefixLock lock(prefix, world);
  torch::manual_seed(1);  // otherwise the seed is random
  const PictureRun run(world);
  checkpoint::Contents contents{.model = run.model.get(), .optimizer = run.optimizer.get()};
  int step = 0;
  if (const auto last = checkpoint::latest(prefix)) {
    checkpoint::load(*last, contents, world);
    step = contents.notes.at("step").as<int>();
  }
  checkpoint::AsyncSaver saver(world);
  while (step < kSteps) {
    run.train(step, step + 1);
    contents.notes["step"] = ++step;
    const auto folder = checkpoint::step_folder(prefix, step);
    if (step % 2 == 0) {
      saver.save(folder, contents);
    } else {
      saver.wait();
      checkpoint::save(folder, contents, world);
    }
    std::this_thread::sleep_for(5ms);
  }
  return 0;
}

const ChildTask train_here("train until killed", train);

Process start(const std::filesystem::path& prefix) {
  const auto tessera = std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera";
  return Process({tessera, "launch", "--nproc-per-node", "3", this_program()}, train_here.environment(prefix), Process::Output::Capture);
}

/// The processes that the launcher has started, in any order.
std::vector<pid_t> children_of(pid_t launcher) {
  std::ifstream list("/proc/" + std::to_string(launcher) + "/task/" + std::to_string(launcher) + "/children");
  return {std::istream_iterator<pid_t>(list), {}};
}

bool runs(pid_t process) {
  std::ifstream file("/proc/" + std::to_string(process) + "/stat");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto name_end = text.rfind(')');
  return name_end != std::string::npos && text[name_end + 2] != 'Z';
}

std::string end_of(Process& job) {
  const auto said = job.read_output();
  const auto status = job.wait(20s);
  return status == 0 ? "" : "ended with " + std::to_string(status.value_or(-1)) + ": " + said;
}

TEST(Kills, ChangeNothing) {
  const Folder whole, killed;
  auto undisturbed = start(whole / "run");
  ASSERT_EQ(end_of(undisturbed), "");
  const uint64_t seed = std::random_device()();
  SCOPED_TRACE("seed " + std::to_string(seed));
  std::mt19937_64 random(seed);
  int restarts = 0;
  for (int kill = 0; kill < kKills; kill++) {
    auto job = start(killed / "run");
    std::this_thread::sleep_for(std::chrono::milliseconds(random() % 2500));
    auto targets = children_of(job.pid());
    targets.push_back(job.pid());
    ::kill(targets[random() % targets.size()], random() % 4 == 0 ? SIGTERM : SIGKILL);
    restarts += !end_of(job).empty();
    for (const auto target : targets) {
      for (int i = 0; i < 500 && runs(target); i++) std::this_thread::sleep_for(10ms);
      ASSERT_FALSE(runs(target)) << "kill " << kill << " has left process " << target;
    }
    if (const auto newest = checkpoint::latest(killed / "run")) {
      ASSERT_TRUE(checkpoint::verify(*newest).faults.empty()) << "kill " << kill;
    }
    // A run that is done begins anew, so that each kill hits a process.
    if (std::filesystem::exists(checkpoint::step_folder(killed / "run", kSteps))) {
      for (int step = kill % kSteps + 1; step <= kSteps; step++) std::filesystem::remove_all(checkpoint::step_folder(killed / "run", step));
    }
  }
  auto last = start(killed / "run");
  ASSERT_EQ(end_of(last), "");
  EXPECT_GT(restarts, 10);
  for (int rank = 0; rank < 3; rank++) {
    const auto file = "run-step-0000" + std::to_string(kSteps) + "/rank-" + std::to_string(rank) + "-of-3.safetensors";
    const checkpoint::SafetensorsFile expected(whole / file), found(killed / file);
    for (const auto& name : expected.names()) {
      EXPECT_TRUE(at::equal(found.read(name), expected.read(name))) << name;
    }
  }
}

}  // namespace
}  // namespace tessera::testing::kills_long_test
