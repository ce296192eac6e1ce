// A real scrape of PrometheusReporter, and clients that are none.
#include "tessera/train/prometheus_reporter.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/port.h"
#include "tessera/train/trainer.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/transports.h"

namespace tessera::train::prometheus_reporter_test {
namespace {

using ::testing::AllOf;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace tessera::testing;

Fd connected(int port) {
  Fd client(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  EXPECT_EQ(::connect(client.get(), reinterpret_cast<sockaddr*>(&address), sizeof address), 0);
  return client;
}

/// What the server answers until it closes the connection.
std::string answer_to(int port, const std::string& request) {
  const auto client = connected(port);
  EXPECT_EQ(::send(client.get(), request.data(), request.size(), MSG_NOSIGNAL), static_cast<ssize_t>(request.size()));
  std::string text;
  char buffer[4096];
  for (ssize_t count = 0; (count = ::recv(client.get(), buffer, sizeof buffer, 0)) > 0;) text.append(buffer, static_cast<size_t>(count));
  return text;
}

TEST(PrometheusReports, AreGauges) {
  const int port = free_port();
  PrometheusReporter reporter(port);
  const std::string get = "GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n";
  EXPECT_THAT(answer_to(port, get), AllOf(StartsWith("HTTP/1.1 200 OK\r\n"), EndsWith("\r\n\r\n")));
  reporter.write(1, {{"train/loss", 0.5}, {"lr", 0.1}});
  reporter.write(2, {{"train/loss", 0.25}, {"größe", -std::numeric_limits<double>::infinity()}, {"norm", std::nan("")}});
  const auto label = "{run=\"" + std::string(program_invocation_short_name) + "\"} ";
  EXPECT_THAT(answer_to(port, get),
              AllOf(HasSubstr("text/plain; version=0.0.4"), HasSubstr("# TYPE tessera_lr gauge\ntessera_lr" + label + "0.1\n"),
                    HasSubstr("\ntessera_train_loss" + label + "0.25\n"), HasSubstr("\ntessera_step" + label + "2\n"),
                    HasSubstr("\ntessera_gr____e" + label + "-inf\n"), HasSubstr("\ntessera_norm" + label + "nan\n")));
  const auto read = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/trackers.py", "prometheus", std::to_string(port)});
  if (read.status == kNoPackage) GTEST_SKIP() << "build/python/trackers has no package prometheus_client";
  EXPECT_THAT(read.output, HasSubstr("\"tessera_train_loss\": [0.25, {\"run\": \"" + std::string(program_invocation_short_name) + "\"}]"));
}

TEST(PrometheusReports, OtherRequestsGetNothing) {
  const int port = free_port();
  const PrometheusReporter reporter(port);
  EXPECT_THAT(answer_to(port, "GET / HTTP/1.1\r\n\r\n"), AllOf(StartsWith("HTTP/1.1 404 "), HasSubstr("GET /metrics")));
  EXPECT_THAT(answer_to(port, "POST /metrics HTTP/1.1\r\n\r\n"), StartsWith("HTTP/1.1 404 "));
  EXPECT_EQ(answer_to(port, std::string(20'000, 'x')), "");
  const auto silent = connected(port);  // holds up neither others for long, nor the end
  EXPECT_THAT(answer_to(port, "GET /metrics HTTP/1.0\r\n\r\n"), StartsWith("HTTP/1.1 200 "));
}

TEST(PrometheusReports, APortInUseIsNamed) {
  const int port = free_port();
  const PrometheusReporter reporter(port);
  EXPECT_THAT(message_of<ConfigError>([&] { PrometheusReporter(port, {}); }),
              AllOf(HasSubstr("127.0.0.1:" + std::to_string(port)), HasSubstr("in use"), HasSubstr("prometheus:PORT")));
  PrometheusReporter(port, {.rank = 1}).write(1, {{"loss", 1}});  // other ranks serve nothing
}

TEST(PrometheusReports, APortOfAnotherProgramIsRefusedBeforeTheFirstReport) {
  const Fd taken(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(taken.get(), reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::listen(taken.get(), 1), 0);
  ASSERT_EQ(::getsockname(taken.get(), reinterpret_cast<sockaddr*>(&address), &length), 0);
  const auto name = "prometheus:" + std::to_string(ntohs(address.sin_port));
  with_ranks(1, [&](const Communicator& world) {
    EXPECT_THAT(message_of<ConfigError>([&] { const Trainer trainer({.world = world, .log_with = {name}}); }), HasSubstr("in use"));
  });
}

}  // namespace
}  // namespace tessera::train::prometheus_reporter_test
