// Launchers of several hosts, all of which are this one.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/port.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::nodes_test {
namespace {

using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

/// A job of several nodes.
struct Cluster {
  int nodes;
  Command flags = {};
  std::string endpoint = "127.0.0.1:" + std::to_string(free_port());

  Launched start(int node, const std::string& ranks, const Command& program) const {
    Command all = {"--nnodes", std::to_string(nodes), "--node-rank", std::to_string(node), "--rdzv-endpoint", endpoint};
    all.insert(all.end(), flags.begin(), flags.end());
    return Launched(launch(ranks, program, all), {{"TESSERA_HOST_ID", "host" + std::to_string(node)}});
  }
};

TEST(Nodes, NumberTheirRanksTogether) {
  const Cluster cluster{.nodes = 2};
  const auto script = shell(
      "echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $GROUP_RANK $GROUP_WORLD_SIZE; "
      "[ $LOCAL_RANK = 1 ] || echo $MASTER_ADDR $MASTER_PORT $TESSERA_SECRET $TORCHELASTIC_RUN_ID >&2");
  auto second = cluster.start(1, "2", script), first = cluster.start(0, "1", script);
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_THAT(lines(zero.out), ElementsAre("[rank 0] 0 0 3 1 0 2"));
  EXPECT_THAT(lines(one.out), UnorderedElementsAre("[rank 1] 1 0 3 2 1 2", "[rank 2] 2 1 3 2 1 2"));
  const auto place = [](const Launched::Ended& ended) {
    const auto all = lines(ended.err);
    return all.back().substr(all.back().find(']'));
  };
  EXPECT_EQ(place(zero), place(one));
  EXPECT_THAT(place(zero), HasSubstr("127.0.0.1"));
}

TEST(Nodes, RunWhatTalksBetweenHosts) {
  const Cluster cluster{.nodes = 2};
  const Command test = {launch("", {}).front(), "test"};
  auto second = cluster.start(1, "1", test), first = cluster.start(0, "1", test);
  const auto zero = first.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_THAT(zero.out, HasSubstr("gloo: 2 ranks"));
  EXPECT_EQ(second.end().status, 0);
}

TEST(Nodes, StopWhenARankOfAnotherOneFails) {
  const Cluster cluster{.nodes = 2};
  const auto script = shell("[ $RANK = 1 ] || exec sleep 100; echo 'no such file' >&2; exit 3");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 3);
  EXPECT_EQ(one.status, 3);
  EXPECT_THAT(zero.err,
              AllOf(HasSubstr("launch: on node 1 ("), HasSubstr("rank 1 ended with status 3; its last words:\n  no such file\n")));
  EXPECT_THAT(one.err, Not(HasSubstr("on node")));  // node 1 has reported its own rank
}

TEST(Nodes, FindTheRankBecauseOfWhichOthersFail) {
  const Cluster cluster{.nodes = 2};
  const auto script = shell("[ $RANK = 1 ] && { sleep 0.5; echo 'the cause' >&2; exit 5; }; echo 0 1 >>$TESSERA_LAUNCH_RECORD; exit 4");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  const auto zero = first.end();
  EXPECT_EQ(zero.status, 5) << zero.err;
  EXPECT_THAT(zero.err,
              AllOf(HasSubstr("it failed because of rank 1, on another node"), HasSubstr("launch: on node 1 ("), HasSubstr("the cause")));
  EXPECT_EQ(second.end().status, 5);
}

TEST(Nodes, BeginAgainTogether) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1"}};
  const auto script = shell("[ $TORCHELASTIC_RESTART_COUNT = 1 ] && { echo through; exit 0; }; [ $RANK = 1 ] && exit 3; exec sleep 100");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(zero.out, "[rank 0] through\n");
  EXPECT_EQ(one.out, "[rank 1] through\n");
}

TEST(Nodes, GoOnWithoutOneThatIsGone) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1", "--min-ranks", "1", "--node-timeout", "3"}};
  const auto script = shell("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { echo ready $$; exec sleep 100; }; echo of $WORLD_SIZE");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  const auto rank = numbers_in(second.read_line()).at(1);
  ::kill(second.pid(), SIGKILL);
  const auto zero = first.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_THAT(zero.err, AllOf(HasSubstr("launch: node 1 ("), HasSubstr("lost: no sign of life for 3 s")));
  EXPECT_EQ(zero.out, "[rank 0] of 1\n");
  EXPECT_TRUE(ends(rank));
}

// The ranks of the launcher that ends are done, so the others do not need it any more.
TEST(Nodes, MayEndBeforeTheOthersHaveFinished) {
  const Cluster cluster{.nodes = 2, .flags = {"--node-timeout", "2"}};
  const auto script = shell("echo ready; [ $RANK = 1 ] && exit 0; sleep 5; echo finished");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(second.read_line(), HasSubstr("ready"));
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));  // until it has told node 0 that its ranks have ended
  ::kill(second.pid(), SIGKILL);
  const auto zero = first.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(zero.out, "[rank 0] finished\n") << zero.err;
}

TEST(Nodes, KeepTheLeastNumberOfRanksTogether) {
  const auto script = shell("[ $RANK = 3 ] && kill -9 $$; exec sleep 100");
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "2", "--min-ranks", "4"}};
  auto second = cluster.start(1, "2", script), first = cluster.start(0, "2", script);
  for (auto* node : {&first, &second}) {
    const auto ended = node->end();
    EXPECT_EQ(ended.status, 137) << ended.err;
    EXPECT_THAT(ended.err, AllOf(HasSubstr("3 of at least 4 ranks are left, so this was the last attempt"), Not(HasSubstr("begins"))));
  }
  const Cluster too_small{.nodes = 2, .flags = {"--max-restarts", "2", "--min-ranks", "5"}};
  auto other = too_small.start(1, "2", script), one = too_small.start(0, "2", script);
  EXPECT_EQ(other.end().status, 1);
  EXPECT_THAT(one.end().err, HasSubstr("--min-ranks 5 can't be kept: all nodes together have 4 ranks"));
}

TEST(Nodes, HearOfSignalsToOneWhoseRanksHaveEnded) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1"}};
  const auto script =
      shell("echo ready; [ $RANK = 1 ] && exit 0; trap 'echo saved; exit 0' TERM; echo waiting; while :; do sleep 0.1; done");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(second.read_line(), HasSubstr("ready"));
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  EXPECT_THAT(first.read_line(), HasSubstr("waiting"));
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  ::kill(second.pid(), SIGUSR1);  // a signal for ranks, of which none run here
  ::kill(second.pid(), SIGTERM);
  const auto zero = first.end();
  EXPECT_EQ(zero.out, "[rank 0] saved\n") << zero.err;
  EXPECT_EQ(second.end().status, zero.status);
}

TEST(Nodes, EndAtOnceWhileTheyWaitForOthers) {
  const Cluster cluster{.nodes = 2};
  auto first = cluster.start(0, "1", {"true"});
  std::this_thread::sleep_for(std::chrono::milliseconds(1000));
  ::kill(first.pid(), SIGTERM);
  EXPECT_THAT(first.end().status, AnyOf(128 + SIGTERM, -SIGTERM));  // the latter if it does not handle signals yet
}

TEST(Nodes, MayHaveDifferentNumbersOfRanksBesideSizes) {
  const Cluster cluster{.nodes = 2, .flags = {"--parallelism-config-dp-replicate-size", "3", "--parallelism-config-dp-shard-size", "1"}};
  auto second = cluster.start(1, "1", {"true"}), first = cluster.start(0, "2", {"true"});
  const auto zero = first.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(second.end().status, 0);
}

TEST(Nodes, TakeBackOneThatComesAgain) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1", "--node-timeout", "3"}};
  const auto script = shell("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { echo ready; exec sleep 100; }; echo of $WORLD_SIZE");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  EXPECT_THAT(second.read_line(), HasSubstr("ready"));
  ::kill(second.pid(), SIGKILL);
  auto again = cluster.start(1, "1", script);
  const auto zero = first.end(), one = again.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(zero.out, "[rank 0] of 2\n");
  EXPECT_EQ(one.out, "[rank 1] of 2\n");
  EXPECT_THAT(one.err, HasSubstr("launch: the job runs already; waiting for its next attempt\n"));
}

TEST(Nodes, EndWithTheJobThatEndsWithoutThem) {
  const Folder folder;
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1", "--node-timeout", "3"}};
  const auto go = (folder / "go").string();
  const auto script = shell("[ $RANK = 1 ] || while [ ! -e " + go + " ]; do sleep 0.05; done; echo ends");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(second.read_line(), HasSubstr("ends"));
  std::this_thread::sleep_for(std::chrono::seconds(1));  // until node 0 knows that
  ::kill(second.pid(), SIGKILL);
  auto again = cluster.start(1, "1", script);
  std::this_thread::sleep_for(std::chrono::seconds(4));  // longer than a node that still runs may be silent
  std::ofstream{go};
  const auto zero = first.end(), one = again.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(zero.out, "[rank 0] ends\n");
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_THAT(one.err, HasSubstr("launch: the job has ended\n"));
}

TEST(Nodes, EndWhenTheFirstOneIsGone) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1", "--node-timeout", "2", "--grace", "1"}};
  const auto script = shell("echo ready $$; exec sleep 100");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  const auto rank = numbers_in(second.read_line()).at(1);
  ::kill(first.pid(), SIGKILL);
  const auto one = second.end();
  EXPECT_EQ(one.status, 1);
  EXPECT_THAT(one.err, AllOf(HasSubstr("the launcher of node 0 at " + cluster.endpoint + " is gone"),
                             HasSubstr("it has not come back within 3 s")));
  EXPECT_TRUE(ends(rank));
}

// As if the link of node 0 were cut: its host exists, but does not answer.
TEST(Nodes, EndWhenTheFirstOneDoesNotAnswer) {
  const Cluster cluster{.nodes = 2, .flags = {"--node-timeout", "2"}};
  const auto script = shell("echo ready $$; exec sleep 100");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  const auto rank = numbers_in(second.read_line()).at(1);
  ::kill(first.pid(), SIGSTOP);
  const auto one = second.end();
  EXPECT_EQ(one.status, 1);
  EXPECT_THAT(one.err, HasSubstr("the launcher of node 0 at " + cluster.endpoint + " is gone (the connection to the store is lost: it does "
                                 "not answer)"));
  EXPECT_TRUE(ends(rank));
  ::kill(first.pid(), SIGKILL);
}

// As if a link were cut that comes back: each launcher loses the other one, and both take part in the next attempt.
TEST(Nodes, ComeBackWhenTheFirstOneAnswersAgain) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1", "--node-timeout", "4"}};
  const auto script = shell("[ $TORCHELASTIC_RESTART_COUNT = 1 ] || { echo ready; exec sleep 100; }; echo of $WORLD_SIZE");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  EXPECT_THAT(second.read_line(), HasSubstr("ready"));
  ::kill(first.pid(), SIGSTOP);
  EXPECT_TRUE(second.says("trying for 14 s to take part in the next attempt"));
  ::kill(first.pid(), SIGCONT);
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(one.status, 0) << one.err;
  EXPECT_EQ(zero.out, "[rank 0] of 2\n");
  EXPECT_EQ(one.out, "[rank 1] of 2\n");
}

TEST(Nodes, PassASignalOnToAll) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1"}};
  const auto script = shell("trap 'echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done");
  auto second = cluster.start(1, "1", script), first = cluster.start(0, "1", script);
  EXPECT_THAT(first.read_line(), HasSubstr("ready"));
  EXPECT_THAT(second.read_line(), HasSubstr("ready"));
  ::kill(second.pid(), SIGTERM);
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 0) << zero.err;
  EXPECT_EQ(zero.out, "[rank 0] saved\n");
  EXPECT_EQ(one.out, "[rank 1] saved\n");
}

TEST(Nodes, NeedEachANumberOfItsOwn) {
  const Cluster cluster{.nodes = 3};
  auto first = cluster.start(0, "1", {"true"}), second = cluster.start(1, "1", {"true"}), twin = cluster.start(1, "1", {"true"});
  EXPECT_TRUE(comes_true([&] { return state(std::to_string(second.pid())) == 'Z' || state(std::to_string(twin.pid())) == 'Z'; }));
  ::kill(first.pid(), SIGTERM);  // ends the wait for node 2
  const auto one = second.end(), other = twin.end();
  EXPECT_EQ(one.status, 1);
  EXPECT_EQ(other.status, 1);
  EXPECT_THAT(one.err + other.err,
              AllOf(HasSubstr("there is a node 1 already"), HasSubstr("of node 0 at " + cluster.endpoint + " is gone")));
}

TEST(Nodes, LearnWhyAnotherOneCanNotStart) {
  const Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1"}};
  auto second = cluster.start(1, "1", {"/no/such/program"}), first = cluster.start(0, "1", {"sleep", "100"});
  const auto zero = first.end(), one = second.end();
  EXPECT_EQ(zero.status, 1);
  EXPECT_EQ(one.status, 1);
  EXPECT_THAT(zero.err, AllOf(HasSubstr("launch: on node 1 ("), HasSubstr("can't start '/no/such/program'"), Not(HasSubstr("begins"))));
}

TEST(Nodes, HaveTheFlagsOfNode0) {
  Cluster cluster{.nodes = 2, .flags = {"--max-restarts", "1"}};
  const auto script = shell("echo $TORCHELASTIC_RESTART_COUNT of $TORCHELASTIC_MAX_RESTARTS; exit 3");
  auto first = cluster.start(0, "1", script);
  cluster.flags = {};
  auto second = cluster.start(1, "1", script);
  EXPECT_THAT(lines(second.end().out), ElementsAre("[rank 1] 0 of 1", "[rank 1] 1 of 1"));
  EXPECT_EQ(first.end().status, 3);
  const Cluster two{.nodes = 2}, three{.nodes = 3, .flags = {}, .endpoint = two.endpoint};
  auto of_two = two.start(0, "1", {"true"});
  const auto refused = three.start(1, "1", {"true"}).end();
  EXPECT_EQ(refused.status, 1);
  EXPECT_THAT(refused.err, HasSubstr("--nnodes is 3 here, but 2 on node 0"));
  ::kill(of_two.pid(), SIGTERM);
}

TEST(Nodes, AreNumberedByALauncherAroundThem) {
  const auto endpoint = "127.0.0.1:" + std::to_string(free_port());
  const auto start = [&](const std::string& node) {
    return Launched(launch("1", shell("echo $RANK of $WORLD_SIZE"),
                           {"--nnodes", "2", "--master-addr", "127.0.0.1", "--master-port", endpoint.substr(endpoint.find(':') + 1)}),
                    {{"OMPI_COMM_WORLD_RANK", node}, {"OMPI_COMM_WORLD_SIZE", "2"}});
  };
  auto second = start("1"), first = start("0");
  EXPECT_EQ(first.end().out, "[rank 0] 0 of 2\n");
  EXPECT_EQ(second.end().out, "[rank 1] 1 of 2\n");
}

TEST(Nodes, AreRefusedWithTheWayOut) {
  const auto refusal = [](const Command& flags) {
    const auto ended = run("1", {"true"}, {}, flags);
    EXPECT_EQ(ended.status, 2) << ended.err;
    return ended.err;
  };
  EXPECT_THAT(refusal({"--nnodes", "2", "--rdzv-endpoint", "a:1"}), HasSubstr("--nnodes 2 needs --node-rank, 0 to 1"));
  EXPECT_THAT(refusal({"--nnodes", "2", "--node-rank", "0"}), HasSubstr("--nnodes 2 needs --rdzv-endpoint HOST:PORT"));
  EXPECT_THAT(refusal({"--nnodes", "2", "--node-rank", "2"}), HasSubstr("machine_rank 2 is not below num_machines 2"));
  for (const auto* wrong : {":1", "fe80::1:29500", "[fe80::1"})
    EXPECT_THAT(refusal({"--rdzv-endpoint", wrong}), HasSubstr("is not HOST:PORT")) << wrong;
  EXPECT_THAT(refusal({"--rdzv-endpoint", "a:port"}), HasSubstr("--rdzv-endpoint"));
  for (const auto* far : {"65536", "4294996796"}) {
    EXPECT_THAT(refusal({"--main-process-port", far}),
                HasSubstr("main_process_port '" + std::string(far) + "' is not a whole number from 0 to 65535"));
    EXPECT_THAT(refusal({"--rdzv-endpoint", "a:" + std::string(far)}), HasSubstr("from 0 to 65535"));
  }
  EXPECT_THAT(refusal({"--rdzv-endpoint", "a:1", "--main-process-ip", "b"}), HasSubstr("--main-process-ip"));
  EXPECT_THAT(refusal({"--min-ranks", "1"}), HasSubstr("--max-restarts"));
  EXPECT_THAT(refusal({"--nnodes", "4294967297"}), HasSubstr("num_machines '4294967297' is not a whole number from 1 to 65536"));
  const auto too_many = run("4", {"true"}, {}, {"--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "a:1", "--num-processes", "4"});
  EXPECT_EQ(too_many.status, 2);
  EXPECT_THAT(too_many.err, HasSubstr("--num-processes 4 is for all nodes together, and --nproc-per-node 4 leaves none for the others"));
}

}  // namespace
}  // namespace tessera::testing::nodes_test
