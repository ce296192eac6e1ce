#include "tessera/train/prometheus_reporter.h"

#include <errno.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <array>
#include <cctype>
#include <chrono>
#include <cmath>
#include <cstring>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/train/report.h"

namespace tessera::train {
namespace {

constexpr size_t kLongestRequest = 8192;
constexpr std::chrono::seconds kClientLimit(2);  // for its request and for taking the answer

std::string prometheus_name(std::string_view name) {
  std::string result = "tessera_";
  for (const char c : name) result += std::isalnum(static_cast<unsigned char>(c)) != 0 && static_cast<unsigned char>(c) < 0x80 ? c : '_';
  return result;
}

std::string prometheus_label(std::string_view text) {
  std::string result;
  for (const char c : text) result += c == '\\' ? "\\\\" : c == '"' ? "\\\"" : c == '\n' ? "\\n" : std::string(1, c);
  return result;
}

std::string prometheus_number(double number) {
  if (std::isnan(number)) return "NaN";
  return std::isfinite(number) ? shortest_text(number) : number > 0 ? "+Inf" : "-Inf";
}

/// Waits until one of both is ready, or the time has come. Returns whether it is the first one, and the second one is not.
bool client_ready(const Fd& one, short events, const Fd& ended, std::chrono::steady_clock::time_point limit) {
  std::array<pollfd, 2> waiting = {pollfd{.fd = one.get(), .events = events, .revents = 0},
                                   pollfd{.fd = ended.get(), .events = POLLIN, .revents = 0}};
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - std::chrono::steady_clock::now()).count();
  return left > 0 && ::poll(waiting.data(), waiting.size(), static_cast<int>(left)) > 0 && waiting[1].revents == 0;
}

}  // namespace

PrometheusReporter::PrometheusReporter(int port, const ReporterOptions& options) {
  if (options.rank != 0) return;
  listener_ = Fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  constexpr int kYes = 1;  // otherwise a restarted run could not have its port for a minute
  ::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!listener_ || ::bind(listener_.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener_.get(), 16) != 0) {
    throw ConfigError("metrics can't be served at 127.0.0.1:{} ({}); give prometheus:PORT with another port, or end the program that has it",
                      port, std::strerror(errno));
  }
  std::array<int, 2> pipe{};
  if (::pipe2(pipe.data(), O_CLOEXEC) != 0) throw IoError("no pipe for the server of metrics: {}", std::strerror(errno));
  ended_ = Fd(pipe[0]);
  end_ = Fd(pipe[1]);
  server_ = quiet_thread([this] { serve(); });
}

PrometheusReporter::~PrometheusReporter() {
  end_ = Fd();
  if (server_.joinable()) server_.join();
}

void PrometheusReporter::write(int64_t step, const Values& values) {
  if (!listener_) return;
  expect_names("Prometheus", step, values);
  const std::lock_guard lock(mutex_);
  newest_[prometheus_name("step")] = static_cast<double>(step);
  for (const auto& value : values) newest_[prometheus_name(value.name)] = value.value;
}

std::string PrometheusReporter::page() const {
  const std::lock_guard lock(mutex_);
  std::string text;
  for (const auto& [name, number] : newest_) {
    text += fmt::format("# TYPE {} gauge\n{}{{run=\"{}\"}} {}\n", name, name, prometheus_label(program_invocation_short_name),
                        prometheus_number(number));
  }
  return text;
}

void PrometheusReporter::serve() const {
  while (true) {
    std::array<pollfd, 2> waiting = {pollfd{.fd = listener_.get(), .events = POLLIN, .revents = 0},
                                     pollfd{.fd = ended_.get(), .events = POLLIN, .revents = 0}};
    if (::poll(waiting.data(), waiting.size(), -1) < 0 && errno != EINTR) return;
    if (waiting[1].revents != 0) return;
    if (const Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); client) {
      answer(client);
    } else {
      ::poll(&waiting[1], 1, 100);  // if the process has no descriptor left, the client stays in the queue
    }
  }
}

/// One client at a time, each for a limited time, because a scrape is short.
void PrometheusReporter::answer(const Fd& client) const {
  const auto limit = std::chrono::steady_clock::now() + kClientLimit;
  std::string request;
  while (request.find("\r\n\r\n") == std::string::npos) {
    std::array<char, 1024> part{};
    if (request.size() >= kLongestRequest || !client_ready(client, POLLIN, ended_, limit)) return;
    const auto count = ::recv(client.get(), part.data(), part.size(), 0);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count <= 0) return;
    request.append(part.data(), static_cast<size_t>(count));
  }
  const bool is_known = request.starts_with("GET /metrics ") || request.starts_with("GET /metrics?");
  const auto body = is_known ? page() : "the numbers of the run are at GET /metrics\n";
  const auto text = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      is_known ? "200 OK" : "404 Not Found", body.size(), body);
  for (std::string_view rest = text; !rest.empty();) {
    if (!client_ready(client, POLLOUT, ended_, limit)) return;
    const auto count = ::send(client.get(), rest.data(), rest.size(), MSG_NOSIGNAL);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) continue;
    if (count < 0) return;
    rest.remove_prefix(static_cast<size_t>(count));
  }
}

}  // namespace tessera::train
