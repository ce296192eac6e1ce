// Ranks as real processes: they meet as under a launcher, are killed with SIGKILL, and leave nothing behind.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <sstream>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/port.h"
#include "tessera/base/process.h"
#include "tessera/comm/calling.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/comm/host/shared_area.h"
#include "tessera/comm/init.h"
#include "tests/testing/child_task.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::processes_test {

/// Limits the address space of this process to `bytes` more than it has.
void leave_room_for(size_t bytes) {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  const rlim_t most = pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE)) + bytes;
  const rlimit limit{.rlim_cur = most, .rlim_max = most};
  ::setrlimit(RLIMIT_AS, &limit);
}

/// The addresses at which this process listens, other than loopback, as the kernel lists them.
std::vector<std::string> open_doors() {
  std::set<std::string> own;  // "socket:[12345]"
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    std::error_code closed_meanwhile;
    own.insert(std::filesystem::read_symlink(entry.path(), closed_meanwhile));
  }
  std::vector<std::string> doors;
  for (const auto* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      const std::vector<std::string> fields{std::istream_iterator<std::string>(words), {}};
      const bool listens = fields.size() > 9 && fields[3] == "0A" && own.contains("socket:[" + fields[9] + "]");
      const bool loopback = fields[1].starts_with("0100007F:") || fields[1].starts_with("00000000000000000000000001000000:");
      if (listens && !loopback) doors.push_back(fields[1]);
    }
  }
  return doors;
}

constexpr auto kAtTwoLevels = " at two levels";

/// Runs a child process of these tests. Returns 0 if all is as it should be.
int child(const std::string& task) {
  InitOptions options{.start_limit = kTestLimit, .operation_limit = kTestLimit};
  if (task == "wait in vain") options.start_limit = std::chrono::milliseconds(500), options.start_notice = std::chrono::milliseconds(100);
  try {
    const auto world = init(options);
    std::printf("rank %d talks over %s%s\n", world.rank(), world.traits().name.c_str(), world.traits().levels == 2 ? kAtTwoLevels : "");
    const auto sum = at::full({1000}, static_cast<float>(world.rank()));
    world.all_reduce(sum, {}, {.unit = "hello"}).wait();
    const auto expected = static_cast<float>(world.size() * (world.size() - 1) / 2);
    if (sum[999].item<float>() != expected) return 2;
    for (const auto& door : open_doors()) std::printf("listens at %s\n", door.c_str());
    if (task == "meet twice") {
      const auto again = init(options);
      again.barrier();
      world.barrier();
    }
    if (task == "die" && world.rank() == world.size() - 1) ::raise(SIGKILL);
    if (task == "die first" && world.rank() == 0) ::raise(SIGKILL);
    if (task == "die in waiting" && world.rank() == 0) {
      std::thread([] {
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
        ::raise(SIGKILL);
      }).detach();
    }
    // Longer than a rank takes to notice that another has died, shorter than the limit.
    if (task == "die in waiting" && world.rank() == 2) std::this_thread::sleep_for(std::chrono::seconds(3));
    if (task == "die with a shared area") {
      const auto area = world.share({.bytes_per_rank = 64, .counters = 1}, {.unit = "counters"}).area;
      if (!area) return 2;
      if (world.rank() == world.size() - 1) ::raise(SIGKILL);
      area->reach(0, 1);
      area->wait(0, 1, kTestLimit, [] { return std::string("reading version 1 of unit 'a'"); });
    }
    if (task == "share too much") {
      if (world.rank() == 1) leave_room_for(64U << 20);
      const auto attempt = world.share({.bytes_per_rank = 128U << 20}, {.unit = "parameters"});
      std::printf("%s\n", attempt.area ? "shared" : attempt.why_not.c_str());
    }
    if (task == "throw" && world.rank() == world.size() - 1) throw Error("this rank is out of luck");
    if (task == "sleep" && world.rank() == 1) {
      world.enter("forward", "layers.3");
      std::this_thread::sleep_for(std::chrono::seconds(5));
    }
    if (task == "sleep") world.with_limit(std::chrono::seconds(1)).barrier({.unit = "nap"});
    if (task == "disagree") world.all_reduce(sum, {}, {.unit = world.rank() == 1 ? "b" : "a"}).wait();
    if (task == "trouble in a column") {
      const auto column = world.split(std::array{0, 1, 0, 1});
      const auto say = [](const std::function<void()>& act) {
        try {
          act();
        } catch (const Error& error) {
          std::printf("%s\n", error.what());
        }
      };
      if (world.rank() % 2 == 1) {
        const bool is_last = world.rank() == 3;
        say([&] { column.broadcast(sum, is_last ? 0 : 1).wait(); });
        say([&] { column.broadcast(sum, is_last ? 7 : 0).wait(); });
        say([&] { std::printf("%s\n", difference_on_ranks(column, is_last ? "a\tof 2\n" : "a\tof 1\n", {}).c_str()); });
        say([&] {
          all_or_none(column, {}, "can't begin", [&] {
            if (is_last) throw UsageError("too late");
          });
        });
        say([&] {
          if (is_last) return column.barrier();
          const Calling calling("a function for all");
          column.texts("", {.unit = "texts"});
        });
      }
      world.barrier();
      if (world.rank() == 3) std::this_thread::sleep_for(std::chrono::seconds(2));
      if (world.rank() == 1) column.with_limit(std::chrono::milliseconds(300)).barrier();
    }
    if (task == "take a signal") {
      if (world.rank() == 2) ::raise(SIGUSR2);
      std::this_thread::sleep_for(std::chrono::seconds(4));
    }
    for (int i = 0; i < 2; i++) world.all_reduce(sum, {}, {.unit = "after"}).wait();
    if (task == "run out of files" && world.rank() == 0) {
      const rlimit none{.rlim_cur = 0, .rlim_max = 0};
      ::setrlimit(RLIMIT_NOFILE, &none);
    }
    return 0;
  } catch (const Error& error) {
    std::printf("%s\n", error.what());
    return 3;
  }
}

namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::HasSubstr;
const ChildTask in_child("meet", child);

using Environment = std::map<std::string, std::string>;

struct Ended {
  int status;
  std::string output;
};

struct Job {
  int ranks = 2;
  std::string task = "meet";
  std::string transport = "auto";
  Environment more = {};
};

std::vector<Ended> run_job(const Job& job, const std::function<Environment(int rank)>& extra = {}) {
  const auto port = std::to_string(free_port());
  std::vector<Process> processes;
  for (int rank = 0; rank < job.ranks; rank++) {
    Environment environment = job.more;
    environment.insert({{"RANK", std::to_string(rank)},
                        {"WORLD_SIZE", std::to_string(job.ranks)},
                        {"MASTER_ADDR", "127.0.0.1"},
                        {"MASTER_PORT", port},
                        {"OMP_NUM_THREADS", "1"}});
    const auto engine = job.transport.substr(0, job.transport.find(kAtTwoLevels));
    if (!engine.empty()) environment["TESSERA_TRANSPORT"] = engine;
    if (engine != job.transport) environment["TESSERA_HOST_ID"] = "host" + std::to_string(rank / 2);
    if (extra) environment.merge(extra(rank));
    processes.emplace_back(std::vector<std::string>{this_program()}, in_child.environment(job.task, environment), Process::Output::Capture);
  }
  std::vector<Ended> ended;
  for (auto& process : processes) {
    const auto output = process.read_output();
    ended.push_back({.status = process.wait(std::chrono::seconds(20)).value_or(-1), .output = output});
  }
  return ended;
}

std::set<std::string> shared_memory_files() {
  std::set<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) names.insert(entry.path());
  return names;
}

class OverTransport : public ::testing::TestWithParam<std::string> {};

TEST_P(OverTransport, RanksMeetAndTalk) {
  for (const int ranks : {1, 3}) {
    const auto due = ranks == 1 ? GetParam().substr(0, GetParam().find(kAtTwoLevels)) : GetParam();
    for (const auto& ended : run_job({.ranks = ranks, .task = "meet twice", .transport = GetParam()})) {
      EXPECT_EQ(ended.status, 0) << ended.output;
      EXPECT_THAT(ended.output, HasSubstr("talks over " + due + "\n"));
    }
  }
}

TEST_P(OverTransport, AKilledRankIsNamedWithinTheLimit) {
  const auto before = shared_memory_files();
  const auto ended = run_job({.ranks = 3, .task = "die", .transport = GetParam()});
  EXPECT_EQ(ended[2].status, 128 + SIGKILL);
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ended[rank].status, 3);
    EXPECT_THAT(ended[rank].output, AllOf(HasSubstr("rank 2"), HasSubstr("all_reduce of 'after'"))) << rank;
  }
  EXPECT_EQ(shared_memory_files(), before);
}

TEST(SharedMemory, IsNoPlaceToWaitForTheDead) {
  const auto ended = run_job({.ranks = 3, .task = "die with a shared area", .transport = "shm"});
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ended[rank].status, 3);
    EXPECT_THAT(ended[rank].output, AllOf(HasSubstr("reading version 1 of unit 'a'"), HasSubstr("rank 2"))) << rank;
  }
}

// Rank 0 dies while it waits for rank 2, which is only late: rank 1 hears of it before the limit.
TEST(SharedMemory, TellsOfTheDeadWhileOthersAreLate) {
  const auto ended = run_job({.ranks = 3, .task = "die in waiting", .transport = "shm"});
  EXPECT_EQ(ended[0].status, 128 + SIGKILL);
  EXPECT_EQ(ended[1].status, 3);
  EXPECT_THAT(ended[1].output, AllOf(HasSubstr("can't finish: rank 0 (process"), HasSubstr("has died")));
  EXPECT_EQ(ended[2].status, 3);
}

// If one rank can't get its memory, all ranks get the error, and all may continue.
TEST(SharedMemory, IsRefusedToAllWhereOneRankHasNoRoom) {
  for (const auto& ended : run_job({.ranks = 3, .task = "share too much", .transport = "shm"})) {
    EXPECT_EQ(ended.status, 0) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("rank 1: can't map 402653184 bytes of shared memory: Cannot allocate memory"));
  }
}

// Rank 0 keeps the store.
TEST_P(OverTransport, TheDeathOfRankZeroIsNamedToo) {
  const auto ended = run_job({.ranks = 3, .task = "die first", .transport = GetParam()});
  EXPECT_EQ(ended[0].status, 128 + SIGKILL);
  for (const int rank : {1, 2}) {
    EXPECT_EQ(ended[rank].status, 3);
    EXPECT_THAT(ended[rank].output, HasSubstr("rank 0")) << rank;
  }
}

TEST_P(OverTransport, ARankThatEndsWithAnErrorIsNamed) {
  const auto ended = run_job({.ranks = 3, .task = "throw", .transport = GetParam()});
  EXPECT_THAT(ended[2].output, HasSubstr("out of luck"));
  for (const int rank : {0, 1}) {
    EXPECT_EQ(ended[rank].status, 3);
    EXPECT_THAT(ended[rank].output, HasSubstr("rank 2"));
  }
}

/// The flight report, which only one rank may print.
std::string the_report(const std::vector<Ended>& ended) {
  constexpr std::string_view kHead = "Where the ranks are:";
  std::string report;
  for (const auto& [status, output] : ended) {
    if (output.find(kHead) == std::string::npos) continue;
    EXPECT_EQ(report, "") << "a second report";
    report = output;
  }
  return report;
}

TEST_P(OverTransport, AReportSaysWhereARankIsThatOthersWaitFor) {
  const auto report = the_report(run_job({.ranks = 3, .task = "sleep", .transport = GetParam()}));
  EXPECT_THAT(report, ContainsRegex("rank 0 is before its first unit; waits for [0-9.]+ m?s in barrier of 'nap' \\(operation 2\\)"));
  EXPECT_THAT(report,
              ContainsRegex("rank 1 was last in forward of 'layers.3', [0-9.]+ s ago; in no operation, the last was all_reduce of 'hello'"));
  EXPECT_THAT(report, HasSubstr("the last operations of rank 2:\n  0 barrier of 'start': done"));
}

TEST_P(OverTransport, AReportSaysInWhatRanksDiffer) {
  const auto report = the_report(run_job({.ranks = 3, .task = "disagree", .transport = GetParam()}));
  EXPECT_THAT(
      report,
      HasSubstr("the ranks differ at operation 2:\n  ranks 0 and 2: all_reduce of 'a': 1000 x Float, sum\n  rank 1: all_reduce of 'b'"));
}

TEST_P(OverTransport, ASignalToOneRankBringsAReport) {
  const auto ended = run_job({.ranks = 3, .task = "take a signal", .transport = GetParam()});
  for (const auto& [status, output] : ended) EXPECT_EQ(status, 0) << output;
  EXPECT_THAT(the_report(ended),
              AllOf(HasSubstr("SIGUSR2. Where"), HasSubstr("rank 0 is"), HasSubstr("rank 1 is"), HasSubstr("rank 2 is")));
}

// Rank 3 of the world is rank 1 of its column.
TEST_P(OverTransport, ErrorsOfAPartNameRanksByTheirNumbersInTheWorld) {
  const auto ended = run_job({.ranks = 4, .task = "trouble in a column", .transport = GetParam()});
  for (const int rank : {1, 3}) {
    EXPECT_THAT(ended[rank].output,
                AllOf(HasSubstr("rank 1 at operation 0: broadcast: 1000 x Float from rank 3; rank 3 at operation 0: broadcast: 1000 x Float from rank 1"),
                      HasSubstr("rank 3 can't take part in broadcast"), HasSubstr("rank 1: a of 1; rank 3: a of 2"), HasSubstr("too late"),
                      HasSubstr("rank 1 at operation 6: texts of 'texts', in a function for all; rank 3 at operation 6: barrier;"),
                      HasSubstr("rank 1 called a function for all; every rank must make such a call")))
        << rank;
  }
  // If another rank notices the failure first, rank 1 gets that rank's error before it gives up.
  const auto ends = ::testing::AnyOf(HasSubstr("of rank 1, barrier, waited 0.3 s for rank 3"), HasSubstr("of rank 1, barrier, was broken off"));
  EXPECT_THAT(ended[1].output, AllOf(HasSubstr("rank 3 can't begin: too late"), ends));
  for (const int rank : {0, 2}) {
    EXPECT_EQ(ended[rank].status, 3);
    // Over two levels, rank 2 hears of it through rank 0, which keeps the store with the reason and may have ended before.
    EXPECT_THAT(ended[rank].output, ::testing::AnyOf(HasSubstr("rank 1, barrier, waited 0.3 s for rank 3"), HasSubstr("rank 1 has closed"),
                                                     HasSubstr("rank 0 has closed")))
        << rank;
  }
}

INSTANTIATE_TEST_SUITE_P(Transports, OverTransport, ::testing::Values("shm", "gloo", "gloo at two levels"));

TEST(TwoLevels, NameAKilledRankOnBothHosts) {
  const auto ended = run_job({.ranks = 4, .task = "die", .transport = "gloo at two levels"});
  for (const int rank : {0, 1, 2}) {
    EXPECT_EQ(ended[rank].status, 3);
    EXPECT_THAT(ended[rank].output, AllOf(HasSubstr("rank 3"), HasSubstr("all_reduce of 'after'"))) << rank;
  }
}

TEST(TwoLevels, AreTakenByAllRanksOrByNone) {
  const auto hosts = [](int rank) { return Environment{{"TESSERA_HOST_ID", "host" + std::to_string(rank / 2)}}; };
  for (const auto& ended : run_job({.ranks = 3, .more = {{"TESSERA_LEVELS", "1"}}}, hosts)) {
    EXPECT_EQ(ended.status, 0) << ended.output;
    EXPECT_THAT(ended.output, ::testing::Not(HasSubstr(kAtTwoLevels)));
  }
  const auto differing = [&](int rank) {
    auto environment = hosts(rank);
    if (rank == 1) environment["TESSERA_LEVELS"] = "1";
    return environment;
  };
  for (const auto& ended : run_job({.ranks = 3}, differing)) {
    EXPECT_THAT(ended.output, HasSubstr("rank 0 wants 2 levels, but rank 1 wants 1; set the same TESSERA_LEVELS on all ranks"));
  }
  for (const auto& ended : run_job({.ranks = 3, .more = {{"TESSERA_LOG", "info"}}}, hosts)) {
    EXPECT_THAT(ended.output, HasSubstr("two levels: data crosses the network once a host"));
  }
}

TEST(Init, TakesSharedMemoryOnOneHostAndGlooBetweenHosts) {
  for (const auto& ended : run_job({.ranks = 2})) EXPECT_THAT(ended.output, HasSubstr("talks over shm"));
  const auto two_hosts = [](int rank) { return Environment{{"TESSERA_HOST_ID", "host" + std::to_string(rank / 2)}}; };
  for (const auto& ended : run_job({.ranks = 3}, two_hosts)) {
    EXPECT_EQ(ended.status, 0) << ended.output;
    EXPECT_THAT(ended.output, HasSubstr("talks over gloo"));
  }
  for (const auto& ended : run_job({.ranks = 3, .transport = "shm"}, two_hosts))
    EXPECT_THAT(ended.output, HasSubstr("on several; use gloo"));
}

TEST(Init, MeetsInAFile) {
  const auto path = std::filesystem::temp_directory_path() / ("tessera-store-" + std::to_string(::getpid()));
  const Environment store = {{"TESSERA_STORE", "file:" + path.string()}};
  for (const auto& ended : run_job({.ranks = 3, .transport = "gloo", .more = store})) EXPECT_EQ(ended.status, 0) << ended.output;
  std::filesystem::remove(path);
}

TEST(Init, EndsWithItsStatusWhereTheFileCanNotBeOpenedAnyMore) {
  const Folder folder;
  // The leak sanitizer opens files at the end of a process.
  const Environment store = {{"TESSERA_STORE", "file:" + (folder / "store").string()}, {"LSAN_OPTIONS", "detect_leaks=0"}};
  for (const auto& ended : run_job({.task = "run out of files", .transport = "gloo", .more = store}))
    EXPECT_EQ(ended.status, 0) << ended.output;
}

TEST(Init, NoticesAStoreThatWasUsedBefore) {
  const auto path = std::filesystem::temp_directory_path() / ("tessera-used-store-" + std::to_string(::getpid()));
  std::filesystem::remove(path);
  const auto run = [&](const std::string& rank) {
    const Environment environment = {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"TESSERA_STORE", "file:" + path.string()}};
    return Process({this_program()}, in_child.environment("wait in vain", environment), Process::Output::Capture).read_output();
  };
  EXPECT_THAT(run("0"), HasSubstr("rank 1 of 2 still missing"));
  EXPECT_THAT(run("0"), HasSubstr("rank 0 has already joined"));
  std::filesystem::remove(path);
}

// Neither the store nor gloo lets anybody in from other hosts.
TEST_P(OverTransport, AJobOfOneHostListensOnLoopbackOnly) {
  if (GetParam().ends_with(kAtTwoLevels)) return;  // a job of several hosts
  for (const auto& ended : run_job({.ranks = 3, .transport = GetParam()})) {
    EXPECT_EQ(ended.status, 0) << ended.output;
    EXPECT_THAT(ended.output, ::testing::Not(HasSubstr("listens at")));
  }
}

TEST(Init, NeedsTheSecretOfTheJob) {
  const auto port = std::to_string(free_port());
  const auto rank = [&](const char* number, const char* secret) {
    const Environment environment = {
        {"RANK", number}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}, {"TESSERA_SECRET", secret}};
    return Process({this_program()}, in_child.environment("meet", environment), Process::Output::Capture);
  };
  const auto first = rank("0", "of rank 0");  // keeps the store as long as the other needs to find it
  EXPECT_THAT(rank("1", "guessed").read_output(), HasSubstr("set the same one for every rank"));
}

TEST(Init, RefusesAStoreThatIsNone) {
  const Folder folder;
  const auto said = [&](const std::string& path) {
    return Process({this_program()},
                   in_child.environment("wait in vain", {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TESSERA_STORE", "file:" + path}}),
                   Process::Output::Capture)
        .read_output();
  };
  for (const auto& text : {std::string("some text that was here before"), std::string(1000, '\xff'), std::string(1000, '\0')}) {
    write_file(folder / "used", text);
    EXPECT_THAT(said(folder / "used"), HasSubstr("holds something else than a store")) << text;
  }
  EXPECT_THAT(said(folder.path()), HasSubstr("TESSERA_STORE"));
  EXPECT_EQ(::mkfifo((folder / "fifo").c_str(), 0600), 0);
  EXPECT_THAT(said(folder / "fifo"), HasSubstr("is not a file"));
}

TEST(Init, RanksMustWantTheSameTransport) {
  const auto differing = [](int rank) { return Environment{{"TESSERA_TRANSPORT", rank == 0 ? "shm" : "gloo"}}; };
  for (const auto& ended : run_job({.ranks = 2, .transport = ""}, differing)) {
    EXPECT_THAT(ended.output, HasSubstr("rank 0 wants transport shm, but rank 1 wants gloo"));
  }
}

TEST(Init, NamesTheRanksThatDoNotStart) {
  const auto port = std::to_string(free_port());
  Process lonely(
      {this_program()},
      in_child.environment("wait in vain", {{"RANK", "0"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}}),
      Process::Output::Capture);
  EXPECT_THAT(lonely.read_output(),
              AllOf(HasSubstr("warning: waiting for ranks 1 and 2 of 3 to join at 127.0.0.1:" + port + ", where rank 0 listens"),
                    HasSubstr("; giving up in 0."), HasSubstr("ranks 1 and 2 of 3 still missing")));
  EXPECT_EQ(lonely.wait(std::chrono::seconds(1)), 3);
  Process of_many({this_program()},
                  in_child.environment("wait in vain", {{"RANK", "0"}, {"WORLD_SIZE", "2147483647"}, {"MASTER_ADDR", "127.0.0.1"},
                                                        {"MASTER_PORT", std::to_string(free_port())}}),
                  Process::Output::Capture);
  EXPECT_THAT(of_many.read_output(), HasSubstr(", 63 and 64 and perhaps more of 2147483647 still missing"));
}

TEST(Init, SaysThatRankZeroCanNotBeReached) {
  const auto port = std::to_string(free_port());
  const auto lonely = [&](const Environment& more) {
    Environment environment = {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", port}};
    environment.insert(more.begin(), more.end());
    return Process({this_program()}, in_child.environment("wait in vain", environment), Process::Output::Capture).read_output();
  };
  EXPECT_THAT(lonely({}), HasSubstr("[rank 1] warning: can't reach the store at 127.0.0.1:" + port +
                                    ", where rank 0 listens (MASTER_ADDR, MASTER_PORT): Connection refused; trying for 0."));
  // Of the ranks that have joined, the first one warns for all.
  const Folder folder;
  const auto file = "file:" + (folder / "store").string();
  EXPECT_THAT(lonely({{"TESSERA_STORE", file}}), HasSubstr("waiting for ranks 0 and 2 of 3 to join in TESSERA_STORE=" + file));
}

TEST(Init, RefusesADescriptionThatDoesNotAddUp) {
  const auto said = [](const Environment& environment) {
    return Process({this_program()}, in_child.environment("meet", environment), Process::Output::Capture).read_output();
  };
  EXPECT_THAT(said({{"RANK", "1"}}), HasSubstr("RANK is set but WORLD_SIZE is not"));
  EXPECT_THAT(said({{"RANK", "two"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK='two' is not a whole number"));
  EXPECT_THAT(said({{"RANK", "2"}, {"WORLD_SIZE", "2"}}), HasSubstr("RANK=2 does not exist"));
  EXPECT_THAT(said({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"MASTER_PORT", "99999"}}), HasSubstr("MASTER_PORT='99999'"));
  EXPECT_THAT(said({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TESSERA_STORE", "/tmp/x"}}), HasSubstr("write file:"));
  EXPECT_THAT(said({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"TESSERA_STORE", "file:/no/such/folder/store"}}), HasSubstr("No such file"));
  EXPECT_THAT(said({{"RANK", "0"}, {"WORLD_SIZE", "1"}, {"TESSERA_TRANSPORT", "gloo"}, {"GLOO_SOCKET_IFNAME", "nope0"}}),
              HasSubstr("nope0"));
  EXPECT_THAT(said({{"TESSERA_TRANSPORT", "pigeon"}}), HasSubstr("choose one of auto, self, shm, gloo"));
  EXPECT_THAT(said({{"TESSERA_TRANSPORT", "gloo"}}), HasSubstr("needs ranks"));
}

TEST(Init, WarnsOnceOfAVariableThatNobodyReads) {
  const auto ended = run_job({.task = "meet twice", .transport = "shm", .more = {{"TESSERA_TRANSPROT", "gloo"}}});
  const std::string warning = "TESSERA_TRANSPROT (did you mean TESSERA_TRANSPORT?)";
  const auto first = ended[0].output.find(warning);
  EXPECT_NE(first, std::string::npos) << ended[0].output;
  EXPECT_EQ(first, ended[0].output.rfind(warning)) << ended[0].output;
  EXPECT_THAT(ended[1].output, ::testing::Not(HasSubstr(warning)));
}

TEST(Init, IsAWorldOfOneByItself) {
  EXPECT_EQ(init().size(), 1);
}

TEST(Process, NeverOutlivesItsOwner) {
  pid_t pid = 0;
  {
    const Process sleeper({"sleep", "100"}, {});
    pid = sleeper.pid();
    EXPECT_EQ(::kill(pid, 0), 0);
  }
  EXPECT_EQ(::kill(pid, 0), -1);
  EXPECT_THAT(message_of<IoError>([] { Process({"/no/such/program"}, {}); }), HasSubstr("/no/such/program"));
}

}  // namespace
}  // namespace tessera::testing::processes_test
