#include "tessera/base/launch_record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <atomic>
#include <charconv>
#include <exception>
#include <filesystem>
#include <fstream>
#include <sstream>

#include "tessera/base/env.h"
#include "tessera/base/fd.h"

namespace tessera {
namespace {

constexpr const char* kMemoryName = "tessera-launch-record";
constexpr const char* kStarts = "starts";
constexpr const char* kJoined = "joined";
constexpr const char* kSettings = "settings";
constexpr const char* kRecovers = "recovers";
constexpr const char* kStep = "step";

std::atomic<int> failed = -1;  // the rank of this process that has recorded a failure last

void add_line(int rank, std::string_view words) noexcept try {
  const auto path = env(LaunchRecord::kVariable);
  // In another container the same path may lead to a file of an unrelated process.
  if (!path || std::filesystem::read_symlink(*path) != fmt::format("/memfd:{} (deleted)", kMemoryName)) return;
  const Fd file(::open(path->c_str(), O_WRONLY | O_APPEND | O_CLOEXEC));
  const auto line = fmt::format("{} {}\n", rank, words);
  [[maybe_unused]] const auto written = ::write(file.get(), line.data(), line.size());
} catch (const std::exception&) {  // without the line, the launcher names the rank that ended first
}

void add_failure(int rank, const std::string& words) noexcept {
  add_line(rank, words);
  failed = rank;
}

bool is_known_as(int rank) {
  return env("RANK") == std::to_string(rank);
}

}  // namespace

void record_start(int rank) noexcept {
  add_line(rank, kStarts);
}

void record_joined(int rank) noexcept {
  add_line(rank, kJoined);
}

void record_settings(int rank) noexcept {
  add_line(rank, kSettings);
}

void record_failure(int rank, int culprit) noexcept {
  add_failure(rank, std::to_string(culprit));
}

void record_failure_in_world(int rank, int culprit, bool in_step) noexcept {
  if (is_known_as(rank) && culprit != rank) add_failure(rank, std::to_string(culprit) + (in_step ? std::string(" ") + kStep : ""));
}

void record_recovery(int rank) noexcept {
  if (failed.load(std::memory_order_relaxed) == rank && failed.exchange(-1) == rank) add_line(rank, kRecovers);
}

LaunchRecord::LaunchRecord() : file_(kMemoryName) {}

std::map<int, LaunchRecord::Rank> LaunchRecord::read() const {
  std::map<int, Rank> ranks;
  std::ifstream lines(path());
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    int rank = 0, culprit = 0;
    std::string what;
    if (!(words >> rank >> what)) continue;
    if (what == kStarts) {
      ranks[rank].starts++;
    } else if (what == kJoined) {
      ranks[rank].joined++;
    } else if (what == kSettings) {
      ranks[rank].read_settings = true;
    } else if (what == kRecovers) {
      ranks[rank].culprit.reset();
    } else if (std::from_chars(what.data(), what.data() + what.size(), culprit).ec == std::errc()) {
      // `rank` fails now because of another rank, so it has survived the steps in which other ranks named it as the culprit.
      for (auto& [other, told] : ranks) {
        if (told.in_step && told.culprit == rank) told.culprit.reset();
      }
      std::string where;
      ranks[rank].culprit = culprit;
      ranks[rank].in_step = (words >> where) && where == kStep;
    }
  }
  return ranks;
}

}  // namespace tessera
