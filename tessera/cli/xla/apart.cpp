#include "tessera/cli/xla/apart.h"

#include <fmt/format.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <fstream>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/base/words.h"

namespace tessera::cli {
namespace {

constexpr const char* kStartedApart = "TESSERA_STARTED_APART";
constexpr int kNeverEnded = 124;  // the status that timeout(1) gives to a program that does not end

using Clock = std::chrono::steady_clock;

/// Waits until there is something to read from the stream. Meanwhile shows on a terminal how much time has passed.
void wait_for(const Fd& stream, Clock::time_point start) {
  if (::isatty(STDERR_FILENO) == 0) return;
  bool is_shown = false;
  for (pollfd waiting{.fd = stream.get(), .events = POLLIN, .revents = 0}; ::poll(&waiting, 1, 1000) == 0;) {
    const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(Clock::now() - start).count();
    if (seconds < 3) continue;
    fmt::print(stderr, "\rwaiting for the plugin, {} s", seconds);
    is_shown = true;
  }
  if (is_shown) fmt::print(stderr, "\r\033[K");
}

/// The command line of this process.
std::vector<std::string> own_command() {
  std::ifstream file("/proc/self/cmdline", std::ios::binary);
  std::vector<std::string> words;
  for (std::string word; std::getline(file, word, '\0');) words.push_back(word);
  if (words.empty()) throw IoError("the command line of this process can't be read from /proc/self/cmdline");
  words[0] = this_program();
  return words;
}

/// Returns the line that says why the program ended: the last line that begins with F, as glog's fatal errors do, or else the last line.
std::string last_words(const std::string& text) {
  const auto fatal = text.rfind("\nF");
  auto words =
      fatal == std::string::npos ? text.substr(text.find_last_of('\n', text.size() < 2 ? 0 : text.size() - 2) + 1) : text.substr(fatal + 1);
  words.resize(std::min(words.find('\n'), words.size()));
  return words.empty() ? "it has printed nothing" : printable(words);
}

}  // namespace

int run_apart(std::map<std::string, std::string> environment, const std::function<int()>& body) {
  if (env(kStartedApart)) return body();
  environment[kStartedApart] = "1";
  Pipe err;
  const Fd out(::memfd_create("output", MFD_CLOEXEC));  // printed when the child has ended, so that it does not mix with the line that shows the time
  if (!out) throw IoError("can't make a memory file for the output of a child");
  Process child(own_command(), environment, Process::Output::Inherit, [&] {
    ::dup2(out.get(), STDOUT_FILENO);
    ::dup2(err.write.get(), STDERR_FILENO);
  });
  err.write = Fd();
  const auto said = read_to_end(err.read, [&, start = Clock::now()] { wait_for(err.read, start); });
  const int status = child.wait(std::chrono::hours(1)).value_or(kNeverEnded);
  ::lseek(out.get(), 0, SEEK_SET);
  fmt::print("{}", read_to_end(out));
  if (status == 0) return 0;
  const auto own = said.rfind("tessera: ");
  if (status > 3 || own == std::string::npos) {
    throw Error("the plugin has ended its process, with status {}: {}", status, last_words(said));
  }
  std::fputs(said.c_str() + own, stderr);
  return status;
}

}  // namespace tessera::cli
