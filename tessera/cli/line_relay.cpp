#include "tessera/cli/line_relay.h"

#include <fcntl.h>
#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>

namespace tessera::cli {
namespace {

constexpr size_t kLastLines = 5;
constexpr size_t kLongestLine = 1 << 20;  // a longer line is split

}  // namespace

LineRelay::LineRelay(Fd source, int target, std::string prefix) : source_(std::move(source)), target_(target), prefix_(std::move(prefix)) {
  ::fcntl(source_.get(), F_SETFL, O_NONBLOCK);
}

bool LineRelay::pump() {
  if (!source_) return false;
  std::array<char, 65536> buffer;
  const auto count = ::read(source_.get(), buffer.data(), buffer.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return false;
  if (count > 0) {
    take({buffer.data(), static_cast<size_t>(count)});
  } else {
    if (!line_.empty()) end_line();
    source_ = Fd();
  }
  flush();
  return count > 0;
}

void LineRelay::take(std::string_view text) {
  for (const char letter : text) {
    if (letter == '\n') {
      end_line();
      continue;
    }
    // A carriage return may belong to the line end, so it clears the line only when another letter follows.
    if (line_.ends_with('\r') && letter != '\r') line_.clear();
    line_ += letter;
    if (line_.size() == kLongestLine) end_line();
  }
}

void LineRelay::end_line() {
  while (line_.ends_with('\r')) line_.pop_back();
  ready_ += prefix_ + line_ + '\n';
  // The stack trace in an error of libtorch would push its message out of the last lines.
  if (!line_.starts_with("frame #") && !line_.starts_with("Exception raised from ")) last_lines_.push_back(std::move(line_));
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
  line_.clear();
}

void LineRelay::flush() {
  std::string_view rest = ready_;
  while (!rest.empty()) {
    const auto count = ::write(target_, rest.data(), rest.size());
    if (count < 0 && errno != EINTR && errno != EAGAIN) break;  // nobody reads the output any more, but the ranks must go on
    if (count < 0) {
      pollfd target{.fd = target_, .events = POLLOUT, .revents = 0};
      ::poll(&target, 1, 1000);
    }
    if (count > 0) rest.remove_prefix(static_cast<size_t>(count));
  }
  ready_.clear();
}

}  // namespace tessera::cli
