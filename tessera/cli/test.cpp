// `tessera test`: runs the conformance checks over each transport and prints a verdict for every operation.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <array>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <mutex>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/cli/commands.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/fake/fake.h"
#include "tessera/comm/init.h"
#include "tessera/comm/self/self.h"
#include "tessera/comm/threads/run_ranks.h"

namespace tessera::cli {
namespace {

const std::vector<std::string> kTransports = {"self", "threads", "shm", "gloo", "fake"};

struct TestFlags {
  std::string transport = "all";
  int ranks = 2;
  double limit_s = 60;

  std::chrono::milliseconds limit() const { return std::chrono::milliseconds(static_cast<int64_t>(limit_s * 1000)); }
};

struct Verdict {
  int checks = 0;
  std::vector<std::string> failures;
  std::chrono::duration<double> time{};
};

/// All checks on this rank, by operation, in the order in which they first came. A broken group ends them: nothing after is of use.
std::vector<std::pair<std::string, Verdict>> run_checks(const Communicator& world) {
  std::vector<std::pair<std::string, Verdict>> verdicts;
  for (const auto& check : conformance_checks(world)) {
    auto found = std::ranges::find(verdicts, check.operation, [](const auto& entry) { return entry.first; });
    if (found == verdicts.end()) found = verdicts.insert(found, {check.operation, Verdict()});
    auto& verdict = found->second;
    verdict.checks++;
    const auto start = std::chrono::steady_clock::now();
    try {
      check.run(world);
    } catch (const CommError&) {
      throw;
    } catch (const std::exception& error) {
      verdict.failures.push_back(fmt::format("rank {}: {} {}: {}", world.rank(), check.operation, check.what, error.what()));
    }
    verdict.time += std::chrono::steady_clock::now() - start;
  }
  return verdicts;
}

/// Runs the checks and prints, on rank 0, one line for each operation. Returns whether all of them held on this rank.
bool report(const Communicator& world) {
  static std::mutex printing;
  const auto verdicts = run_checks(world);
  bool good = true;
  std::lock_guard lock(printing);
  for (const auto& [operation, verdict] : verdicts) {
    good &= verdict.failures.empty();
    if (world.rank() == 0) {
      fmt::print("  {:<16}{:<8}{:>4} checks{:>9.1f} ms\n", operation, verdict.failures.empty() ? "ok" : "FAILED", verdict.checks,
                 verdict.time.count() * 1e3);
    }
    for (const auto& failure : verdict.failures) fmt::print("    {}\n", failure);
  }
  std::fflush(stdout);
  return good;
}

/// A file for the ranks to meet in, gone afterwards.
struct MeetingPlace {
  std::filesystem::path folder;
  MeetingPlace() {
    auto pattern = (std::filesystem::temp_directory_path() / "tessera-test-XXXXXX").string();
    if (::mkdtemp(pattern.data()) == nullptr) throw IoError(fmt::format("can't make a folder like {}; is TMPDIR writable?", pattern));
    folder = pattern;
  }
  ~MeetingPlace() {
    std::error_code ignored;
    std::filesystem::remove_all(folder, ignored);
  }
};

/// Starts this program once for each rank; rank 0 prints.
bool test_processes(const std::string& transport, const TestFlags& flags) {
  const MeetingPlace place;
  std::vector<Process> ranks;
  for (int rank = 0; rank < flags.ranks; rank++) {
    ranks.emplace_back(std::vector<std::string>{this_program(), "test", "--limit", fmt::format("{}", flags.limit_s)},
                       std::map<std::string, std::string>{{"RANK", std::to_string(rank)},
                                                          {"WORLD_SIZE", std::to_string(flags.ranks)},
                                                          {"MASTER_ADDR", "127.0.0.1"},
                                                          {"TESSERA_STORE", "file:" + (place.folder / "store").string()},
                                                          {"TESSERA_TRANSPORT", transport}});
  }
  bool good = true;
  for (int rank = 0; rank < flags.ranks; rank++) {
    const auto status = ranks[rank].wait(flags.limit() * 10);
    if (status == 0) continue;
    good = false;
    fmt::print("  rank {} {}\n", rank, status ? fmt::format("ended with status {}", *status) : "did not end");
  }
  return good;
}

bool test_threads(const TestFlags& flags) {
  std::atomic<bool> good = true;
  run_ranks(flags.ranks, [&](const Communicator& world) { good = report(world) && good; }, {.limit = flags.limit()});
  return good;
}

bool test_transport(const std::string& transport, const TestFlags& flags) {
  const int ranks = transport == "self" ? 1 : flags.ranks;
  const auto how = transport == "threads" ? "threads of one process"
                   : transport == "fake"  ? "on paper"
                   : transport == "self"  ? "a lone process"
                                          : "processes of this host";
  fmt::print("{}: {} rank{}, {}\n", transport, ranks, ranks == 1 ? "" : "s", how);
  std::fflush(stdout);
  try {
    if (transport == "self") return report(self_world().with_limit(flags.limit()));
    if (transport == "fake") return report(fake_world(0, flags.ranks).with_limit(flags.limit()));
    if (transport == "threads") return test_threads(flags);
    return test_processes(transport, flags);
  } catch (const Error& error) {
    fmt::print("  FAILED  {}\n", error.what());
    return false;
  }
}

/// One rank of a group that somebody else started: torchrun, mpirun, or test_processes above.
bool test_as_rank(const TestFlags& flags) {
  const auto world = init({.start_limit = flags.limit(), .operation_limit = flags.limit()});
  const bool announced = env("TESSERA_STORE").has_value();  // the one that started us has printed the heading
  if (world.rank() == 0 && !announced) fmt::print("{}: {} ranks\n", world.traits().name, world.size());
  return report(world);
}

int run(const TestFlags& flags) {
  if (env("RANK") || env("OMPI_COMM_WORLD_RANK")) return test_as_rank(flags) ? 0 : 1;
  bool good = true;
  for (const auto& transport : kTransports) {
    if (flags.transport == "all" || flags.transport == transport) good &= test_transport(transport, flags);
  }
  fmt::print("{}\n", good ? "all transports keep their promises" : "some promises are not kept: see the lines above");
  return good ? 0 : 1;
}

}  // namespace

void add_test_command(CLI::App& app) {
  auto* command = app.add_subcommand("test", "Shows that ranks on this machine can talk, with a verdict for every operation");
  const auto flags = std::make_shared<TestFlags>();
  auto names = kTransports;
  names.insert(names.begin(), "all");
  command->add_option("--transport", flags->transport, "What the ranks talk over")->check(CLI::IsMember(names))->capture_default_str();
  command->add_option("--ranks", flags->ranks, "How many ranks (self has one)")->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--limit", flags->limit_s, "Seconds that an operation may wait for other ranks")
      ->check(CLI::Range(0.1, 3600.0))
      ->capture_default_str();
  command->footer(
      "Started by torchrun or mpirun it is one rank of their job:\n"
      "  mpirun -n 4 tessera test\n"
      "  torchrun --no-python --nproc-per-node 4 tessera test");
  command->callback([flags] {
    if (const int status = run(*flags); status != 0) throw CLI::RuntimeError(status);
  });
}

}  // namespace tessera::cli
