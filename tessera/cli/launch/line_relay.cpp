#include "tessera/cli/launch/line_relay.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>

namespace tessera::cli {
namespace {

constexpr size_t kLastLines = 5;
constexpr size_t kLongestLine = 1 << 20;  // a longer line is split
constexpr size_t kMostReady = 1 << 18;
constexpr size_t kLongLine = 40;
constexpr size_t kMostRecent = 64;
constexpr auto kRecent = std::chrono::seconds(2);

}  // namespace

std::optional<int> RecentLines::printed_by_another(int rank, const std::string& line, bool goes_on) {
  const auto now = std::chrono::steady_clock::now();
  while (!lines_.empty() && (lines_.size() > kMostRecent || now - lines_.front().when > kRecent)) lines_.pop_front();
  const auto known = std::ranges::find_if(lines_, [&](const Line& other) { return other.rank != rank && other.text == line; });
  if (known != lines_.end() && (goes_on || line.size() >= kLongLine)) return known->rank;
  lines_.push_back({.rank = rank, .text = line, .when = now});
  return {};
}

LineRelay::LineRelay(Fd source, Output* target, std::string prefix, LogFile log, int rank, RecentLines* recent)
    : source_(std::move(source)), target_(target), prefix_(std::move(prefix)), log_(std::move(log)), rank_(rank), recent_(recent) {
  ::fcntl(source_.get(), F_SETFL, O_NONBLOCK);
}

bool LineRelay::has_room() const {
  return ready_.size() < kMostReady;
}

void LineRelay::pump() {
  if (source_ && has_room()) read_some();
  if (ready_.empty() || target_ == nullptr || !target_->idle()) return;
  target_->write(ready_);
  ready_.clear();
}

void LineRelay::finish() {
  // Reads no more than the pipe holds, because a process that the rank has left behind may never stop writing.
  auto left = static_cast<int64_t>(std::max(::fcntl(source_.get(), F_GETPIPE_SZ), 0));
  while (source_ && left > 0) {
    const auto count = read_some();
    if (count == 0) break;
    left -= static_cast<int64_t>(count);
  }
  if (!line_.empty()) end_line();
  source_ = Fd();
  if (target_ != nullptr) target_->write(ready_);
  ready_.clear();
}

/// Reads from the source once. Returns the number of bytes; 0 if there are none at present or the end is reached.
size_t LineRelay::read_some() {
  std::array<char, 65536> buffer;
  const auto count = ::read(source_.get(), buffer.data(), buffer.size());
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) return 0;
  if (count > 0) {
    const std::string_view text(buffer.data(), static_cast<size_t>(count));
    log_.write(text);
    take(text);
    return static_cast<size_t>(count);
  }
  if (!line_.empty()) end_line();
  source_ = Fd();
  return 0;
}

void LineRelay::take(std::string_view text) {
  for (const char letter : text) {
    if (letter == '\n') {
      end_line();
      continue;
    }
    // A carriage return may belong to the line end "\r\n", so it clears the line only when another letter follows.
    if (line_.ends_with('\r') && letter != '\r') line_.clear();
    line_ += letter;
    if (line_.size() == kLongestLine) end_line();
  }
}

void LineRelay::end_line() {
  while (line_.ends_with('\r')) line_.pop_back();
  if (target_ != nullptr) {
    const auto other = recent_ == nullptr ? std::optional<int>() : recent_->printed_by_another(rank_, line_, repeats_.has_value());
    if (!other) ready_ += prefix_ + line_ + '\n';
    if (other && other != repeats_) ready_ += prefix_ + "the same as rank " + std::to_string(*other) + '\n';
    repeats_ = other;
  }
  // The stack trace in an error of libtorch would push its message out of the last lines.
  if (!line_.starts_with("frame #") && !line_.starts_with("Exception raised from ")) last_lines_.push_back(std::move(line_));
  if (last_lines_.size() > kLastLines) last_lines_.pop_front();
  line_.clear();
}

}  // namespace tessera::cli
