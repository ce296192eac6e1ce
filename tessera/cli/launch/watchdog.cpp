#include "tessera/cli/launch/watchdog.h"

#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <iterator>
#include <sstream>

#include "tessera/base/error.h"
#include "tessera/base/process.h"

namespace tessera::cli {
namespace {

constexpr char kName[] = "rank-watchdog";

/// The memory in which this process has its command line, which ps shows. Empty if it is not known.
struct CommandLine {
  char* begin = nullptr;
  size_t size = 0;

  CommandLine() {
    std::ifstream file("/proc/self/stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    std::istringstream rest(text.substr(text.rfind(')') + 1));  // the name, in parentheses, may have spaces
    const std::vector<std::string> fields{std::istream_iterator<std::string>(rest), {}};
    constexpr size_t kBegin = 45, kEnd = 46;  // fields 48 and 49 of proc(5), which counts from 1; `rest` leaves out the first two
    if (fields.size() <= kEnd) return;
    const auto from = std::stoull(fields[kBegin]), to = std::stoull(fields[kEnd]);
    if (from == 0 || to <= from) return;
    begin = reinterpret_cast<char*>(from);
    size = to - from;
  }

  /// Writes `text` over the command line. Makes only async-signal-safe calls.
  void overwrite(const char* text) const {
    if (size == 0) return;
    std::memset(begin, 0, size);
    std::strncpy(begin, text, size - 1);
  }
};

}  // namespace

Watchdog::Watchdog(int groups) : size_(groups) {
  const auto bytes = sizeof(std::atomic<pid_t>) * static_cast<size_t>(size_);
  void* const memory = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) throw IoError(std::string("no memory to share with the watchdog: ") + std::strerror(errno));
  groups_ = static_cast<std::atomic<pid_t>*>(memory);  // fresh memory is zero: no groups
  start();
}

void Watchdog::start() {
  const CommandLine command_line;
  Pipe pipe;
  pid_ = ::fork();
  if (pid_ < 0) throw IoError(std::string("can't start the watchdog: ") + std::strerror(errno));
  if (pid_ == 0) {
    // A kill of the launcher by its name or by its process group must not hit this process, too.
    ::prctl(PR_SET_NAME, kName);
    command_line.overwrite(kName);
    ::setsid();
    // Closes the outputs of the launcher and the pipes of the ranks, whose readers would otherwise wait for this process.
    const auto lifeline = static_cast<unsigned>(pipe.read.get());
    if (lifeline > 0) ::close_range(0, lifeline - 1, 0);
    ::close_range(lifeline + 1, UINT_MAX, 0);
    char nothing = 0;
    while (::read(pipe.read.get(), &nothing, 1) < 0 && errno == EINTR) {
    }
    for (int place = 0; place < size_; place++) {
      if (const pid_t group = groups_[place]; group > 0) ::kill(-group, SIGKILL);
    }
    ::_exit(0);
  }
  lifeline_ = std::move(pipe.write);
}

bool Watchdog::revive() {
  if (pid_ > 0 && ::waitpid(pid_, nullptr, WNOHANG) != pid_) return false;
  pid_ = -1;  // in case start() throws
  start();
  return true;
}

Watchdog::~Watchdog() {
  lifeline_ = Fd();
  if (pid_ > 0) {
    ::kill(pid_, SIGCONT);  // it may have been stopped by SIGSTOP
    ::waitpid(pid_, nullptr, 0);
  }
  ::munmap(groups_, sizeof(std::atomic<pid_t>) * static_cast<size_t>(size_));
}

}  // namespace tessera::cli
