#include "tessera/cli/config/raw_terminal.h"

#include <poll.h>
#include <signal.h>
#include <termios.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace tessera::cli {
namespace {

constexpr std::array kEndingSignals = {SIGINT, SIGTERM, SIGHUP, SIGQUIT};

// Global, because a signal handler needs them.
termios terminal_before;
std::array<struct sigaction, kEndingSignals.size()> handlers_before;

void restore_terminal() {
  ::tcsetattr(STDIN_FILENO, TCSANOW, &terminal_before);
  constexpr char kShowCursor[] = "\x1b[?25h";
  (void)!::write(STDOUT_FILENO, kShowCursor, sizeof kShowCursor - 1);
}

void restore_and_end(int signal) {
  restore_terminal();
  ::signal(signal, SIG_DFL);
  ::raise(signal);
}

std::optional<char> read_byte() {
  char byte = 0;
  ssize_t count = 0;
  do count = ::read(STDIN_FILENO, &byte, 1);
  while (count < 0 && errno == EINTR);
  if (count != 1) return std::nullopt;
  return byte;
}

/// Whether more bytes of a key's escape sequence can be read. The bytes of a sequence arrive together; no bytes follow that of the key
/// Escape.
bool has_more() {
  pollfd input{.fd = STDIN_FILENO, .events = POLLIN, .revents = 0};
  return ::poll(&input, 1, 50) == 1;
}

}  // namespace

RawTerminal::RawTerminal() {
  ::tcgetattr(STDIN_FILENO, &terminal_before);
  struct sigaction action{};
  action.sa_handler = restore_and_end;
  action.sa_flags = static_cast<int>(SA_RESETHAND | SA_NODEFER);
  for (size_t i = 0; i < kEndingSignals.size(); i++) ::sigaction(kEndingSignals[i], &action, &handlers_before[i]);
  auto raw = terminal_before;
  raw.c_lflag &= ~static_cast<tcflag_t>(ICANON | ECHO | ISIG);
  raw.c_cc[VMIN] = 1;
  raw.c_cc[VTIME] = 0;
  ::tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
}

RawTerminal::~RawTerminal() {
  restore_terminal();
  for (size_t i = 0; i < kEndingSignals.size(); i++) ::sigaction(kEndingSignals[i], &handlers_before[i], nullptr);
}

std::optional<char> RawTerminal::read_key() const {
  constexpr char kControlD = 4, kEscape = 27;
  const auto byte = read_byte();
  if (!byte || *byte == kControlD) return std::nullopt;
  if (*byte == '\r') return kEnter;
  if (*byte != kEscape) return byte;
  if (!has_more()) return kOther;
  const auto second = read_byte();
  if (second != '[' && second != 'O') return kOther;
  auto last = read_byte();
  while (last && (*last == ';' || (*last >= '0' && *last <= '9'))) last = read_byte();  // parameters; a key with Shift or Ctrl has some
  return last == 'A' ? kUp : last == 'B' ? kDown : kOther;
}

}  // namespace tessera::cli
