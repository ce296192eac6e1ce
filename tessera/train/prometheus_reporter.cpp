#include "tessera/train/prometheus_reporter.h"

#include <errno.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/time.h>

#include <array>
#include <cctype>
#include <chrono>
#include <cstring>
#include <nlohmann/json.hpp>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/train/report.h"

namespace tessera::train {
namespace {

std::string prometheus_name(std::string_view name) {
  std::string result = "tessera_";
  for (const char c : name) result += std::isalnum(static_cast<unsigned char>(c)) != 0 ? c : '_';  // in the locale C, only ASCII letters
  return result;
}

std::atomic<int> servers_here = 0;

Fd port_listener(int port) {
  Fd listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  constexpr int kYes = 1;  // otherwise a restarted run could not have its port for a minute
  ::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &kYes, sizeof kYes);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (!listener || ::bind(listener.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 ||
      ::listen(listener.get(), 16) != 0) {
    throw ConfigError(
        "metrics can't be served at 127.0.0.1:{} ({}); give prometheus:PORT with another port, or end the program that has this one", port,
        std::strerror(errno));
  }
  return listener;
}

}  // namespace

void PrometheusReporter::expect_free(int port) {
  if (servers_here == 0) (void)port_listener(port);
}

PrometheusReporter::PrometheusReporter(int port, const ReporterOptions& options) {
  if (options.rank != 0) return;
  listener_ = port_listener(port);
  servers_here++;
  server_ = quiet_thread([this] { serve(); });
}

PrometheusReporter::~PrometheusReporter() {
  ended_ = true;
  ::shutdown(listener_.get(), SHUT_RDWR);  // wakes accept()
  if (!server_.joinable()) return;
  server_.join();
  servers_here--;
}

void PrometheusReporter::write(int64_t step, const Values& values) {
  if (!listener_) return;
  expect_names("Prometheus", step, values);
  const std::lock_guard lock(mutex_);
  newest_[prometheus_name("step")] = static_cast<double>(step);
  for (const auto& value : values) newest_[prometheus_name(value.name)] = value.value;
}

std::string PrometheusReporter::page() const {
  using nlohmann::json;
  const auto run = json(program_invocation_short_name).dump(-1, ' ', false, json::error_handler_t::replace);
  std::string text;
  const std::lock_guard lock(mutex_);
  for (const auto& [name, number] : newest_)
    text += fmt::format("# TYPE {0} gauge\n{0}{{run={1}}} {2}\n", name, run, shortest_text(number));
  return text;
}

void PrometheusReporter::serve() const {
  while (!ended_) {
    if (const Fd client(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC)); client) {
      answer(client);
    } else if (!ended_) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the process may have no descriptor left
    }
  }
}

/// One client at a time, because a scrape is short. One that is slow holds up the others for some seconds.
void PrometheusReporter::answer(const Fd& client) const {
  constexpr timeval kPatient{.tv_sec = 1, .tv_usec = 0};
  for (const int option : {SO_RCVTIMEO, SO_SNDTIMEO}) ::setsockopt(client.get(), SOL_SOCKET, option, &kPatient, sizeof kPatient);
  std::string request;
  for (int parts = 0; request.find("\r\n\r\n") == std::string::npos; parts++) {
    std::array<char, 4096> part{};
    const auto count = ::recv(client.get(), part.data(), part.size(), 0);
    if (count <= 0 || parts == 4) return;
    request.append(part.data(), static_cast<size_t>(count));
  }
  const bool is_known = request.starts_with("GET /metrics");
  const auto body = is_known ? page() : "the numbers of the run are at GET /metrics\n";
  const auto text = fmt::format(
      "HTTP/1.1 {}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{}",
      is_known ? "200 OK" : "404 Not Found", body.size(), body);
  (void)!::send(client.get(), text.data(), text.size(), MSG_NOSIGNAL);
}

}  // namespace tessera::train
