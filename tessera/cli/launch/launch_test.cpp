// `tessera launch` as a user meets it: what it prints, how it ends, and that nothing outlives it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::launch_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::MatchesRegex;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

TEST(Signals, OfEndedRanksComeWhereTheyWereIgnored) {
  Command command = {"sh", "-c", "trap '' CHLD; exec \"$@\"", "-"};
  for (const auto& word : launch("2", shell("exit $((RANK * 3))"))) command.push_back(word);
  const auto ended = Launched(command).end();
  EXPECT_EQ(ended.status, 3) << ended.err;
}

TEST(Launch, PutsTheRankBeforeEachLineAndKeepsTheStreamsApart) {
  const auto ended = run("2", shell("echo \"out of $RANK\"; echo \"err of $RANK\" >&2; printf unfinished"));
  EXPECT_EQ(ended.status, 0);
  EXPECT_THAT(lines(ended.out),
              UnorderedElementsAre("[rank 0] out of 0", "[rank 0] unfinished", "[rank 1] out of 1", "[rank 1] unfinished"));
  EXPECT_THAT(lines(ended.err), UnorderedElementsAre(HasSubstr("launch: 2 ranks"), "[rank 0] err of 0", "[rank 1] err of 1"));
}

TEST(Launch, ShowsOnceWhatAllRanksPrintAsAnError) {
  const std::string paragraph =
      "the data set is neither here nor where the program looked for it\\nso give it by the flag that is for data sets";
  const auto ended = run("3", shell("printf '" + paragraph + "\\n' >&2; printf '" + paragraph + "\\n'"));
  EXPECT_THAT(lines(ended.out), ::testing::SizeIs(6));
  EXPECT_THAT(lines(ended.err), ::testing::SizeIs(1 + 2 + 2)) << ended.err;
  EXPECT_THAT(lines(ended.err), ::testing::Contains(MatchesRegex("\\[rank [0-2]\\] the same as rank [0-2]")).Times(2));
}

TEST(Launch, TearsNoLine) {
  const auto ended = run("3", shell("for i in $(seq 100); do printf %03000d $RANK; printf %03000d $RANK; echo; done"));
  const auto printed = lines(ended.out);
  EXPECT_EQ(printed.size(), 300);
  for (const auto& line : printed) {
    const auto zeros = std::string(2999, '0');
    const auto part = zeros + line[6];
    ASSERT_EQ(line, std::string("[rank ") + line[6] + "] " + part + part);
  }
}

TEST(Launch, ShowsALineThatWasOverwrittenAsItLookedLast) {
  EXPECT_EQ(run("1", shell("printf '10%%\\r20%%\\r\\nplain\\r\\n'")).out, "[rank 0] 20%\n[rank 0] plain\n");
}

TEST(Launch, DescribesTheWorldToEachRank) {
  const auto script = shell("echo $RANK $LOCAL_RANK $WORLD_SIZE $LOCAL_WORLD_SIZE $MASTER_ADDR ${MASTER_PORT:+port}${TESSERA_STORE}");
  const auto ended = run("2", script, {{"TESSERA_STORE", "file:/left/over"}});
  EXPECT_THAT(lines(ended.out), UnorderedElementsAre("[rank 0] 0 0 2 2 127.0.0.1 port", "[rank 1] 1 1 2 2 127.0.0.1 port"));
}

TEST(Launch, GivesAllXlaDevicesToOneProcess) {
  const auto script = shell("echo $RANK $WORLD_SIZE $TESSERA_TRANSPORT $TESSERA_XLA_DEVICES");
  EXPECT_EQ(run("3", script, {}, {"--distributed-type", "XLA"}).out, "[rank 0] 0 1 xla 3\n");
  const auto sharded = run("2", script, {{"TESSERA_DEVICE", "xla"}}, {"--use-fsdp"});
  EXPECT_EQ(sharded.out, "[rank 0] 0 1 xla 2\n");
  EXPECT_THAT(sharded.err, HasSubstr("launch: 1 process with 2 XLA devices"));
  const auto several =
      run("2", script, {{"TESSERA_TRANSPORT", "xla"}}, {"--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", "127.0.0.1"});
  EXPECT_EQ(several.status, 2);
  EXPECT_THAT(several.err, HasSubstr("XLA devices of several nodes can't train together yet"));
}

TEST(Launch, TellsRanksWhereTheirSettingsComeFrom) {
  const Folder folder;
  write_file(folder / "run.yaml", "fsdp_config:\n  fsdp_version: 2\ntessera_config:\n  layout: rows\n");
  const auto place = (folder / "run.yaml").string();
  const Command explain = {launch("1", {}).front(), "config", "explain"};
  const auto ended = run("1", explain, {{"TESSERA_GRAD_DTYPE", "fp64"}, {"TESSERA_CONFIG_FILE", ""}, {"HF_HOME", folder.path()}},
                         {"--config-file", place, "--tessera-max-live-units", "3", "--mixed-precision", "bf16"});
  ASSERT_EQ(ended.status, 0) << ended.err;
  const auto from = [](const char* key, const char* value, const std::string& where) {
    return ::testing::ContainsRegex(fmt::format("{} +{} +{}\n", key, value, where));
  };
  EXPECT_THAT(ended.out, AllOf(from("fsdp_version", "2", "file " + place + ":2"), from("tessera_layout", "rows", "file " + place + ":4"),
                               from("tessera_max_live_units", "3", "flag --tessera-max-live-units"),
                               from("mixed_precision", "bf16", "flag --mixed-precision"),
                               from("tessera_grad_dtype", "fp64", "environment TESSERA_GRAD_DTYPE")));
}

TEST(Launch, LetsRanksTalkOverWhatTheSettingsSay) {
  const auto script = shell("echo $RANK $TESSERA_TRANSPORT");
  EXPECT_THAT(lines(run("2", script, {{"TESSERA_TRANSPORT", "shm"}}, {"--tessera-transport", "gloo"}).out),
              UnorderedElementsAre("[rank 0] 0 gloo", "[rank 1] 1 gloo"));
}

TEST(Launch, SaysHowManyThreadsARankHas) {
  const auto script = shell("echo $OMP_NUM_THREADS");
  auto unset = launch("64", script);
  unset.insert(unset.begin(), {"env", "-u", "OMP_NUM_THREADS"});
  const auto chosen = Launched(unset).end();
  EXPECT_THAT(chosen.err, MatchesRegex("launch: 64 ranks on [0-9]+ cores?, [0-9]+ threads? each \\(OMP_NUM_THREADS\\), port [0-9]+\n"));
  const auto printed = lines(chosen.out);
  EXPECT_EQ(printed.size(), 64);
  for (const auto& line : printed) EXPECT_THAT(chosen.err, HasSubstr(", " + numbers_in(line).at(0) + " thread"));
  const auto given = run("2", script, {{"OMP_NUM_THREADS", "7"}});
  EXPECT_THAT(given.err, HasSubstr("7 threads each (OMP_NUM_THREADS as it was)"));
  EXPECT_THAT(lines(given.out), UnorderedElementsAre("[rank 0] 7", "[rank 1] 7"));
  const auto asked = run("2", script, {{"OMP_NUM_THREADS", "7"}}, {"--num_cpu_threads_per_process", "3"});
  EXPECT_THAT(asked.err, HasSubstr("3 threads each (OMP_NUM_THREADS), port"));
  EXPECT_THAT(lines(asked.out), UnorderedElementsAre("[rank 0] 3", "[rank 1] 3"));
}

TEST(Launch, LetsThreadsThatWaitGiveUpTheirCoreWhereRanksFillTheMachine) {
  const auto script = shell("echo ${GOMP_SPINCOUNT:-unset}");
  const auto turns = [&](const std::string& threads, const Environment& environment = {}) {
    return run("1", script, environment, {"--num-cpu-threads-per-process", threads}).out;
  };
  const auto many = std::to_string(std::thread::hardware_concurrency() + 1);
  EXPECT_EQ(turns(many), "[rank 0] 2000\n");
  EXPECT_EQ(turns("1"), "[rank 0] unset\n");
  EXPECT_EQ(turns(many, {{"OMP_WAIT_POLICY", "active"}}), "[rank 0] unset\n");
  EXPECT_EQ(turns(many, {{"GOMP_SPINCOUNT", "7"}}), "[rank 0] 7\n");
}

TEST(Launch, NamesTheRankThatFailsAndStopsTheOthers) {
  const auto ended = run("3", shell("[ $RANK = 1 ] || exec sleep 100; for i in 1 2 3 4 5 6; do echo word $i >&2; done; exit 3"));
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, ::testing::EndsWith("launch: rank 1 ended with status 3 (stopped ranks 0 and 2); its last words:\n"
                                             "  word 2\n  word 3\n  word 4\n  word 5\n  word 6\n"));
}

TEST(Launch, LetsTheOthersSayWhatTheySawOfAFailure) {
  const auto ended = run("2", shell("[ $RANK = 0 ] || exit 3; sleep 0.1; echo 'rank 1 is gone' >&2; exit 4"));
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("[rank 0] rank 1 is gone"), HasSubstr("launch: rank 1 ended with status 3 and said nothing")));
}

TEST(Launch, NamesTheRankThatTheOthersFailBecauseOf) {
  const auto noticed = [](const std::string& culprit) {
    return run("3", shell("[ $RANK = 2 ] && { sleep 0.3; echo 'no such file: data.bin' >&2; exit 5; }; "
                          "echo $RANK " +
                          culprit + " >>$TESSERA_LAUNCH_RECORD; exit 4"));
  };
  const auto ended = noticed("2");
  EXPECT_EQ(ended.status, 5);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 2 ended with status 5; its last words:\n  no such file: data.bin"));
  // A culprit that does not exist, or that launch has stopped, is ignored.
  EXPECT_EQ(noticed("17").status, 4);
  EXPECT_EQ(noticed("-1").status, 4);
  EXPECT_EQ(run("2", shell("[ $RANK = 0 ] && exec sleep 100; echo 1 0 >>$TESSERA_LAUNCH_RECORD; exit 4")).status, 4);
}

TEST(Launch, SaysThatTheRankWhichOthersNeededHasEndedWell) {
  const auto ended = run("2", shell("[ $RANK = 0 ] && exit 0; sleep 0.3; echo 1 0 >>$TESSERA_LAUNCH_RECORD; exit 4"));
  EXPECT_EQ(ended.status, 4);
  EXPECT_THAT(ended.err,
              HasSubstr("rank 1 ended with status 4 and said nothing on standard error; rank 0, which it still needed, had ended "
                        "with status 0\n"));
}

TEST(Launch, NamesTheRankForWhichOthersWaitInVain) {
  const auto ended = run("3", shell("[ $RANK = 1 ] && exit 0; sleep 0.$RANK; echo $RANK starts >>$TESSERA_LAUNCH_RECORD; exec sleep 100"));
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 1 ended with status 0 and said nothing on standard error, while rank 0 waited for it to "
                                   "join (stopped ranks 0 and 2)\n"));
  // No rank waits for the one that ends: first because both have joined the world, then because neither joins one.
  const auto joined = run("2", shell("echo $RANK starts >>$TESSERA_LAUNCH_RECORD; [ $RANK = 1 ] || sleep 0.5; "
                                     "echo $RANK joined >>$TESSERA_LAUNCH_RECORD; exit 0"));
  EXPECT_EQ(joined.status, 0) << joined.err;
  const auto alone = run("2", shell("[ $RANK = 1 ] && exit 0; sleep 0.5; exit 0"));
  EXPECT_EQ(alone.status, 0) << alone.err;
}

TEST(Launch, LeavesCallsOutOfLastWords) {
  const auto ended =
      run("1", shell("echo 'the shards are not here' >&2; for i in 1 2 3 4 5 6; do echo \"frame #$i: f()\" >&2; done; exit 3"));
  EXPECT_THAT(ended.err, ::testing::EndsWith("its last words:\n  the shards are not here\n"));
  EXPECT_THAT(ended.err, HasSubstr("frame #6"));
}

TEST(Launch, NamesTheSignalThatKilledARank) {
  const auto ended = run("2", shell("[ $RANK = 0 ] && kill -9 $$; exit 0"));
  EXPECT_EQ(ended.status, 128 + SIGKILL);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 0 was killed by signal 9 (SIGKILL; if nobody killed it by hand, memory ran out)"));
  EXPECT_THAT(ended.err, Not(HasSubstr("--resume")));  // no rank has joined a world, so the program may know nothing of checkpoints
}

TEST(Launch, KillsARankThatDoesNotListen) {
  const auto ended = run("2", shell("[ $RANK = 1 ] && exit 3; trap '' TERM; echo $$; while :; do sleep 0.1; done"));
  EXPECT_EQ(ended.status, 3);
  EXPECT_TRUE(ends(numbers_in(ended.out).at(0)));
}

TEST(Launch, NamesRanksThatHangWhereTheyTakeNoSignals) {
  const auto script = shell("trap '' TERM INT; echo ready; [ $RANK = 1 ] && exit 3; [ $RANK = 2 ] && while :; do sleep 0.1; done; trap - TERM INT; exec sleep 100");
  const auto ended = run("3", script);
  EXPECT_EQ(ended.status, 3);
  EXPECT_THAT(ended.err, AllOf(HasSubstr("launch: rank 2 still runs 3 s after SIGTERM, and is killed\n"), HasSubstr("launch: rank 1 ended with status 3")));
  Launched interrupted(launch("3", shell("trap '' INT; echo ready; while :; do sleep 0.1; done"), {"--grace", "1"}));
  for (int rank = 0; rank < 3; rank++) interrupted.read_line();
  ::kill(interrupted.pid(), SIGINT);
  EXPECT_THAT(interrupted.end().err, HasSubstr("launch: ranks 0, 1 and 2 still run 1 s after SIGINT, and are killed\n"));
}

TEST(Launch, LeavesNothingBehindThatARankStarted) {
  const auto ended = run("1", shell("sleep 100 & echo $!"));
  EXPECT_EQ(ended.status, 0);
  EXPECT_TRUE(ends(numbers_in(ended.out).at(0)));
}

TEST(Launch, LeavesNothingBehindWhenItIsKilled) {
  Launched job(launch("2", shell("sleep 100 & echo $$ $!; wait")));
  auto pids = numbers_in(job.read_line());
  for (const auto& pid : numbers_in(job.read_line())) pids.push_back(pid);
  ASSERT_EQ(pids.size(), 4);
  for (const auto& pid : pids) EXPECT_NE(state(pid), 'Z');
  ::kill(job.pid(), SIGKILL);
  for (const auto& pid : pids) EXPECT_TRUE(ends(pid));
  EXPECT_EQ(job.end().status, 128 + SIGKILL);
}

TEST(Launch, PassesSignalsOnAndGivesRanksTimeToAnswer) {
  Launched job(launch("1", shell("trap 'echo saving; exit 0' TERM; echo ready; while :; do sleep 0.1; done")));
  EXPECT_EQ(job.read_line(), "[rank 0] ready");
  ::kill(job.pid(), SIGTERM);
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.out, "[rank 0] saving\n");
}

TEST(Launch, KillsRanksThatStillRunAfterTheGrace) {
  auto command = launch("1", shell("trap '' TERM; echo ready; while :; do sleep 0.1; done"));
  command.insert(command.begin() + 2, {"--grace", "1"});
  Launched job(command);
  EXPECT_EQ(job.read_line(), "[rank 0] ready");
  ::kill(job.pid(), SIGTERM);
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 128 + SIGTERM);
  EXPECT_THAT(ended.err, HasSubstr("ranks that still run in 1 s are killed"));
}

TEST(Launch, PassesSignalsOfTheProgramOnWithoutALimit) {
  Launched job(launch("1", shell("trap 'echo saved' USR1; trap 'echo seen' USR2; echo ready; while :; do sleep 0.1; done")));
  EXPECT_EQ(job.read_line(), "[rank 0] ready");
  ::kill(job.pid(), SIGUSR1);
  EXPECT_EQ(job.read_line(), "[rank 0] saved");
  ::kill(job.pid(), SIGUSR2);
  EXPECT_EQ(job.read_line(), "[rank 0] seen");
  ::kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.end().status, 128 + SIGTERM);
}

/// The watchdog of a launcher.
pid_t watchdog_of(pid_t launcher) {
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    if (entry.path().filename().string().find_first_not_of("0123456789") != std::string::npos) continue;
    std::ifstream file(entry.path() / "stat");
    std::string text;
    std::getline(file, text);  // a process may end here; an iterator over the file would throw then
    const auto open = text.find('('), close = text.rfind(')');
    if (close == std::string::npos || text.substr(open, close - open + 1) != "(rank-watchdog)") continue;
    if (std::stoi(text.substr(close + 4)) == launcher) return std::stoi(entry.path().filename());
  }
  return 0;
}

TEST(Launch, StartsItsWatchdogAgain) {
  Launched job(launch("1", shell("echo $$; exec sleep 100")));
  const auto rank = numbers_in(job.read_line()).at(0);
  const auto first = watchdog_of(job.pid());
  ASSERT_GT(first, 0);
  std::ifstream command_line("/proc/" + std::to_string(first) + "/cmdline");
  const std::string shown{std::istreambuf_iterator<char>(command_line), {}};
  EXPECT_THAT(shown, ::testing::StartsWith("rank-watchdog"));
  EXPECT_THAT(shown, Not(HasSubstr("launch")));
  ::kill(first, SIGKILL);
  EXPECT_TRUE(comes_true([&] { return watchdog_of(job.pid()) > 0 && watchdog_of(job.pid()) != first; }));
  EXPECT_TRUE(job.says("launch: the process that guards against leftovers has ended; started it again"));
  ::kill(job.pid(), SIGKILL);
  EXPECT_TRUE(ends(rank));
}

// As `timeout` sends it: to the launcher, and to its process group.
TEST(Launch, TakesASignalThatComesTwiceAtOnceForOne) {
  Launched job(launch("1", shell("trap 'sleep 1; echo saved; exit 0' TERM; echo ready; while :; do sleep 0.1; done")));
  EXPECT_EQ(job.read_line(), "[rank 0] ready");
  ::kill(job.pid(), SIGTERM);
  std::this_thread::sleep_for(50ms);
  ::kill(job.pid(), SIGTERM);
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 0);
  EXPECT_EQ(ended.out, "[rank 0] saved\n");
}

// In a session without a shell nobody could continue the launcher, so the kernel does not stop it.
TEST(Launch, IsNotStoppedWhereNobodyCouldContinueIt) {
  OnTerminal job(launch("1", shell("n=0; until [ $n = 20 ]; do sleep 0.1; n=$((n+1)); done; echo through")));
  std::this_thread::sleep_for(500ms);
  EXPECT_EQ(::write(job.keyboard.get(), "\x1a", 1), 1);
  EXPECT_THAT(job.screen(), HasSubstr("through"));
  EXPECT_EQ(job.process.wait(20s), 0);
}

TEST(Launch, KillsAtTheSecondSignal) {
  Launched job(launch("1", shell("trap 'echo no' INT; echo ready; while :; do sleep 0.1; done")));
  EXPECT_EQ(job.read_line(), "[rank 0] ready");
  ::kill(job.pid(), SIGINT);
  EXPECT_EQ(job.read_line(), "[rank 0] no");
  std::this_thread::sleep_for(300ms);
  ::kill(job.pid(), SIGINT);
  const auto ended = job.end();
  EXPECT_EQ(ended.status, 128 + SIGINT);
  EXPECT_THAT(ended.err, HasSubstr("launch: rank 0 still runs at another signal, and is killed"));
  EXPECT_THAT(ended.err, Not(HasSubstr("launch: rank 0 ended")));  // no rank failed
}

TEST(Launch, StopsAndContinuesWithItsRanks) {
  Launched job(launch("1", {"sh", "-c", "echo $$; exec sleep 100"}));
  const auto pid = numbers_in(job.read_line()).at(0);
  ::kill(job.pid(), SIGTSTP);
  EXPECT_TRUE(comes_true([&] { return state(pid) == 'T' && state(std::to_string(job.pid())) == 'T'; }));
  ::kill(job.pid(), SIGCONT);
  EXPECT_TRUE(comes_true([&] { return state(pid) == 'S'; }));
  ::kill(job.pid(), SIGTERM);
  EXPECT_EQ(job.end().status, 128 + SIGTERM);
}

TEST(Launch, GivesStandardInputToRankZero) {
  const auto ended = run("2", {"sh", "-c", "echo $(readlink /proc/self/fd/0)"});
  EXPECT_THAT(lines(ended.out), ::testing::Contains("[rank 1] /dev/null"));
}

TEST(Launch, GivesTheTerminalToRankZeroAndColoursTheOthers) {
  const auto script = shell("[ -t 1 ] && echo \"rank $RANK has a terminal\"; echo \"line of $RANK\"");
  EXPECT_THAT(OnTerminal(launch("2", script), {{"TERM", "xterm"}, {"NO_COLOR", ""}}).screen(),
              AllOf(HasSubstr("rank 0 has a terminal"), Not(HasSubstr("rank 1 has")), HasSubstr("\nline of 0"),
                    HasSubstr("\033[33m[rank 1] \033[0mline of 1")));
  EXPECT_THAT(OnTerminal(launch("2", script), {{"TERM", "xterm"}, {"NO_COLOR", "1"}}).screen(), HasSubstr("\033[K[rank 1] line of 1"));
}

TEST(Launch, PassesControlCOnOnce) {
  OnTerminal job(launch("2", shell("trap 'echo \"caught by $RANK\"; n=$((n+1))' INT; echo \"ready $RANK\"; "
                                   "until [ \"$n\" ]; do sleep 0.1; done; sleep 0.3; exit $((n-1))")));
  job.wait_for({"ready 0", "ready 1"});
  EXPECT_EQ(::write(job.keyboard.get(), "\x03", 1), 1);
  EXPECT_THAT(job.screen(), AllOf(HasSubstr("caught by 0"), HasSubstr("caught by 1")));
  EXPECT_EQ(job.process.wait(20s), 0);
}

TEST(Launch, LeavesTheLineOfABarWhenItIsInterrupted) {
  const auto script = shell("trap 'exit 1' INT; printf 'ready 10%%'; while :; do sleep 0.1; done");
  OnTerminal job(launch("1", script), {{"TERM", "xterm"}});
  job.wait_for({"ready 10%"});
  EXPECT_EQ(::write(job.keyboard.get(), "\x03", 1), 1);
  EXPECT_THAT(job.screen(), AllOf(HasSubstr("\r\033[Klaunch: passing SIGINT on"), ::testing::EndsWith("\033[K")));
  OnTerminal failing(launch("2", shell("[ $RANK = 1 ] || { printf 'ready 10%%'; exec sleep 100; }; sleep 0.5; exit 3")),
                     {{"TERM", "xterm"}});
  EXPECT_THAT(failing.screen(), HasSubstr("ready 10%\r\033[Klaunch: rank 1 ended with status 3"));
}

TEST(Launch, WarnsOfAVariableThatNobodyReads) {
  EXPECT_THAT(run("1", {"true"}, {{"TESSERA_RESIDENC", "gathered"}}).err,
              HasSubstr("launch: the environment has TESSERA_RESIDENC (did you"));
}

TEST(Launch, PutsTheRankBeforeAWarningOnce) {
  const Environment mistyped = {{"TESSERA_RESIDENC", "gathered"}};
  const Command test = {launch("", {}).front(), "test", "--limit", "20"};
  EXPECT_THAT(run("1", test, mistyped).err, HasSubstr("[rank 0] tessera: warning: the environment has"));
  auto alone = mistyped;
  alone.insert({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_THAT(Launched(test, alone).end().err, ::testing::StartsWith("tessera: [rank 0] warning: the environment has"));
}

TEST(Launch, RefusesWhatCanNotWork) {
  const auto failure = [](const std::string& program) {
    const auto ended = run("2", {program});
    EXPECT_EQ(ended.status, 1);
    return ended.err;
  };
  EXPECT_THAT(failure("/no/such/program"), HasSubstr("can't start '/no/such/program': No such file"));
  EXPECT_THAT(failure("/etc/passwd"), HasSubstr("can't start '/etc/passwd': Permission denied"));
  const auto refusal = [](const std::string& ranks, const Command& program, const Environment& environment = {}) {
    const auto ended = run(ranks, program, environment);
    EXPECT_EQ(ended.status, 2);
    return ended.err;
  };
  EXPECT_THAT(refusal("0", {"true"}), HasSubstr("--nproc-per-node 0 is out of range"));
  EXPECT_THAT(refusal("-1", {"true"}), HasSubstr("--nproc-per-node -1 is out of range"));
  EXPECT_THAT(refusal("100000", {"true"}), HasSubstr("--nproc-per-node 100000 is out of range"));
  EXPECT_THAT(refusal("two", {"true"}), HasSubstr("two"));
  EXPECT_THAT(refusal("2", {}), HasSubstr("needs a program"));
  EXPECT_THAT(refusal("2", {"--nodes", "2", "true"}),
              HasSubstr("no flag '--nodes' (did you mean --nnodes?); flags of launch come before the program"));
  EXPECT_THAT(refusal("2", {"true"}, {{"WORLD_SIZE", "2"}}), HasSubstr("WORLD_SIZE=2"));
  EXPECT_THAT(refusal("2", {"true"}, {{"OMPI_COMM_WORLD_RANK", "1"}, {"OMPI_COMM_WORLD_SIZE", "2"}}), HasSubstr("as rank 1 of 2"));
}

TEST(Launch, LeavesTheProgramsOwnOptionsAlone) {
  EXPECT_EQ(run("1", {"echo", "test", "--nproc-per-node", "7", "-n", "--", "--help"}).out,
            "[rank 0] test --nproc-per-node 7 -n -- --help\n");
  EXPECT_EQ(run("1", {"--", "echo", "--a_b", "-d", "/"}).out, "[rank 0] --a_b -d /\n");
}

TEST(Launch, TakesDashesAndUnderscoresForTheSame) {
  const auto started = [](const Command& flags) {
    auto command = launch("", {});
    command.resize(2);
    command.insert(command.end(), flags.begin(), flags.end());
    return Launched(command).end();
  };
  EXPECT_EQ(started({"--nproc_per_node", "1", "echo", "a_b"}).out, "[rank 0] a_b\n");
  EXPECT_EQ(started({"--nproc_per_node=1", "--", "echo"}).out, "[rank 0] \n");
  const auto mistyped = started({"--nproc_per_nod", "2", "true"});
  EXPECT_EQ(mistyped.status, 2);
  EXPECT_THAT(mistyped.err, HasSubstr("tessera: there is no flag '--nproc_per_nod' (did you mean --nproc-per-node?)"));
  EXPECT_THAT(started({"-np", "2", "true"}).err, HasSubstr("tessera: there is no flag '-np"));
  EXPECT_EQ(started({"-n1", "echo"}).out, "[rank 0] \n");
  EXPECT_THAT(started({"true", "--nproc-per-node", "2"}).err, HasSubstr("comes after the program"));
  EXPECT_THAT(started({"true"}).err, HasSubstr("--nproc-per-node is required"));
}

TEST(Launch, GivesRanksTheConfiguration) {
  const Folder folder;
  write_file(folder / "run.yaml",
             "distributed_type: FSDP\nmixed_precision: bf16\nnum_processes: 2\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n");
  const auto started = [](Command flags) {
    auto command = launch("", {});
    command.resize(2);
    command.insert(command.end(), flags.begin(), flags.end());
    for (const auto* word :
         {"sh", "-c", "echo $RANK $WORLD_SIZE $ACCELERATE_MIXED_PRECISION $FSDP_SHARDING_STRATEGY ${FSDP_STATE_DICT_TYPE:-unset}"})
      command.emplace_back(word);
    return Launched(command).end();
  };
  const auto file = (folder / "run.yaml").string();
  EXPECT_THAT(started({"--config-file", file}).out,
              AllOf(HasSubstr("0 2 bf16 SHARD_GRAD_OP unset"), HasSubstr("1 2 bf16 SHARD_GRAD_OP unset")));
  EXPECT_EQ(started({"--config-file", file, "-n", "1", "--mixed_precision", "no"}).out, "[rank 0] 0 1 no SHARD_GRAD_OP unset\n");
  EXPECT_EQ(started({"--config-file", file, "-n", "1", "--use_fsdp", "--fsdp_reshard_after_forward", "FULL_SHARD"}).out,
            "[rank 0] 0 1 bf16 FULL_SHARD unset\n");
  EXPECT_THAT(
      started({"--config-file", file, "-n", "4", "--parallelism-config-dp-replicate-size", "2", "--parallelism-config-dp-shard-size", "2"})
          .out,
      HasSubstr("3 4 bf16"));
  EXPECT_THAT(started({"--config-file", file, "--cpu", "--multi-gpu"}).err,
              HasSubstr("use_cpu true contradicts distributed_type MULTI_GPU"));
  const auto both = started({"--config-file", file, "--fsdp-sharding-strategy", "FULL_SHARD"});
  EXPECT_THAT(both.err, AllOf(HasSubstr("launch: " + file + ": mixed_precision bf16\n"),
                              HasSubstr("launch: flags: fsdp_sharding_strategy FULL_SHARD\n")));
  const auto wrong = started({"--config-file", file, "--fsdp-sharding-strategy", "FULL_CHARD"});
  EXPECT_EQ(wrong.status, 2);
  EXPECT_THAT(wrong.err, HasSubstr("--fsdp-sharding-strategy"));
  EXPECT_THAT(started({"--config-file", file, "--num-machines", "2"}).err, HasSubstr("--nnodes 2 needs --node-rank"));
}

}  // namespace
}  // namespace tessera::testing::launch_test
