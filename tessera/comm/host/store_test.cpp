// The store of a job keeps values, refuses strangers, and is waited for until a time limit.
#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <fstream>
#include <sstream>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "tessera/base/error.h"
#include "tessera/base/port.h"
#include "tessera/base/secret.h"
#include "tessera/comm/host/rendezvous.h"
#include "tessera/comm/host/store_client.h"
#include "tessera/comm/host/store_server.h"
#include "tests/testing/transports.h"
#include "tests/testing/warnings.h"

namespace tessera::testing::store_test {
namespace {

using namespace std::chrono_literals;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Clock = std::chrono::steady_clock;

constexpr auto kHost = "127.0.0.1";

/// A server at a free port of this host.
struct Served {
  int port = free_port();
  StoreServer server{listen_at(kHost, port, true, Clock::now() + 10s), "secret"};

  c10::intrusive_ptr<StoreClient> client(const std::string& secret = "secret", std::chrono::milliseconds limit = 10s) const {
    return c10::make_intrusive<StoreClient>(kHost, port, secret, Clock::now() + limit);
  }
};

Fd listener(int port) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{
      .sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port)), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  if (::bind(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0 || ::listen(socket.get(), 100) != 0) return {};
  return socket;
}

/// A connection of a process that is not a rank.
Fd stranger(int port) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{
      .sin_family = AF_INET, .sin_port = htons(static_cast<uint16_t>(port)), .sin_addr = {htonl(INADDR_LOOPBACK)}, .sin_zero = {}};
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) return {};
  return socket;
}

void say(const Fd& socket, std::string_view words) {
  [[maybe_unused]] const auto sent = ::send(socket.get(), words.data(), words.size(), MSG_NOSIGNAL);
}

/// Reads until the other side hangs up, or until it has read so many bytes.
std::string hear(const Fd& socket, size_t most = 1000) {
  std::string heard(most, '\0');
  size_t count = 0;
  for (ssize_t some = 1; some > 0 && count < most; count += static_cast<size_t>(std::max<ssize_t>(some, 0))) {
    some = ::recv(socket.get(), heard.data() + count, most - count, 0);
  }
  heard.resize(count);
  return heard;
}

constexpr size_t kGreeting = store_protocol::kHello.size() + store_protocol::kNumberBytes;

/// Says hello with this number, and returns the number of the server.
std::string number_of_server(const Fd& socket, const std::string& own) {
  say(socket, std::string(store_protocol::kHello) + own);
  return hear(socket, kGreeting).substr(store_protocol::kHello.size());
}

TEST(Store, KeepsWhatRanksSet) {
  const Served served;
  const auto one = served.client(), other = served.client();
  one->set("key", std::string("value\0with zeros", 16));
  EXPECT_EQ(other->get_to_str("key"), std::string("value\0with zeros", 16));
  EXPECT_EQ(one->add("count", 2), 2);
  EXPECT_EQ(other->add("count", -5), -3);
  EXPECT_EQ(one->get_to_str("count"), "-3");
  EXPECT_TRUE(other->check({"key", "count"}));
  EXPECT_FALSE(other->check({"key", "nothing"}));
  EXPECT_EQ(one->getNumKeys(), 2);
  EXPECT_EQ(one->compareSet("key", std::string("another"), std::string("new")), std::string("value\0with zeros", 16));
  EXPECT_EQ(one->compareSet("fresh", std::string(), std::string("first")), "first");
  EXPECT_EQ(other->compareSet("fresh", std::string("first"), std::string("second")), "second");
  EXPECT_TRUE(other->deleteKey("key"));
  EXPECT_FALSE(one->deleteKey("key"));
  const auto big = std::string(5'000'000, 'x');
  one->set("big", big);
  EXPECT_EQ(other->clone()->get_to_str("big"), big);
}

TEST(Store, WaitsForKeysUntilTheirLimit) {
  const Served served;
  const auto waiting = served.client();
  std::thread setter([&] {
    const auto other = served.client();
    std::this_thread::sleep_for(100ms);
    other->set("a", std::string("1"));
    other->set("b", std::string("2"));
  });
  waiting->wait({"a", "b"}, 10s);
  EXPECT_EQ(waiting->get_to_str("b"), "2");
  setter.join();
  EXPECT_THAT(message_of<TimeoutError>([&] { waiting->wait({"c"}, 50ms); }), HasSubstr("nobody has set 'c'"));
  EXPECT_EQ(waiting->get_to_str("a"), "1");  // the connection is still good
}

TEST(Store, SaysThatItsServerIsGone) {
  auto served = std::make_unique<Served>();
  const auto client = served->client();
  served.reset();
  EXPECT_THAT(message_of<std::runtime_error>([&] { client->set("key", std::string("value")); }),
              HasSubstr("the connection to the store is lost"));
  EXPECT_THAT(message_of<std::runtime_error>([&] { client->add("key", 1); }), HasSubstr("was lost before"));
}

TEST(Store, TurnsAwayWhoDoesNotKnowTheSecret) {
  const Served served;
  for (const auto* secret : {"", "Secret", "secret and more"}) {
    EXPECT_THAT(message_of<ConfigError>([&] { served.client(secret); }), HasSubstr("TESSERA_SECRET"));
  }
  const auto liar = stranger(served.port);
  say(liar, std::string(store_protocol::kHello) + std::string("\xff\xff\xff\xff", 4));
  say(liar, std::string(28, '\xff'));
  EXPECT_THAT(hear(liar, kGreeting), StartsWith(std::string(store_protocol::kHello)));
  say(liar, std::string(kProofBytes, '\xff'));
  EXPECT_EQ(hear(liar), store_protocol::kRefused);
  EXPECT_EQ(served.client()->add("count", 1), 1);
}

TEST(Store, BelievesEachProofOnlyOnceAndFromOneSide) {
  const Served served;
  const auto number = random_secret();
  const auto rank = stranger(served.port);
  const store_protocol::Numbers numbers{.client = number, .server = number_of_server(rank, number)};
  const auto proof = store_protocol::client_proof("secret", numbers), mirrored = store_protocol::server_proof("secret", numbers);
  say(rank, proof);
  EXPECT_EQ(hear(rank, store_protocol::kWelcome.size() + kProofBytes), std::string(store_protocol::kWelcome) + mirrored);
  for (const auto& recorded : {proof, mirrored}) {
    const auto replayed = stranger(served.port);
    EXPECT_NE(number_of_server(replayed, number), numbers.server);
    say(replayed, recorded + store_protocol::pack({"set", "key", "value"}));
    EXPECT_THAT(hear(replayed), StartsWith(std::string(store_protocol::kRefused)));
  }
  EXPECT_FALSE(served.client()->check({"key"}));
}

TEST(Store, HangsUpOnStrangersThatDoNotFinishTheirHello) {
  const Served served;
  const auto whole = std::string(store_protocol::kHello) + random_secret();
  std::vector<Fd> waiting;
  for (size_t bytes = 0; bytes <= whole.size(); bytes += 8) {
    waiting.push_back(stranger(served.port));
    say(waiting.back(), whole.substr(0, bytes));
    say(stranger(served.port), whole.substr(0, bytes));  // hangs up by itself
  }
  EXPECT_EQ(served.client()->add("count", 1), 1);
  for (const auto& each : waiting) EXPECT_THAT(hear(each).size(), AnyOf(0, kGreeting));  // ends when the server has hung up
}

TEST(Store, SaysThatAnotherVersionIsThere) {
  const Served served;
  const auto old = stranger(served.port);
  say(old, "tessera store 2\n");
  EXPECT_EQ(hear(old), store_protocol::kHello);
}

TEST(Store, IsThereForItsRanksWhateverStrangersDo) {
  const Served served;
  const auto member = served.client();
  std::vector<Fd> silent;
  for (int i = 0; i < 300; i++) silent.push_back(stranger(served.port));
  std::atomic<bool> stop = false;
  std::thread crowd([&] {
    const auto hello = std::string(store_protocol::kHello), words = hello + random_secret();
    for (int i = 0; i < 4100 && !stop; i++) say(stranger(served.port), i % 3 == 0 ? "GET / HTTP/1.1\r\n\r\n" : i % 3 == 1 ? hello : words);
  });
  const auto start = Clock::now();
  for (int i = 1; i <= 5; i++) EXPECT_EQ(served.client()->add("count", 1), i);
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_EQ(member->add("count", 1), 6);
  stop = true;
  crowd.join();
}

TEST(Store, HangsUpOnMembersThatSpeakNonsense) {
  const Served served;
  for (const auto& nonsense : {store_protocol::pack({"no such verb"}), store_protocol::pack({"add"}), store_protocol::sized("\1\1\1\1\1"),
                               std::string("\xff\xff\xff\xff", 4)}) {
    const auto member = stranger(served.port);
    const auto number = random_secret();
    const store_protocol::Numbers numbers{.client = number, .server = number_of_server(member, number)};
    say(member, store_protocol::client_proof("secret", numbers) + nonsense);
    EXPECT_EQ(hear(member), std::string(store_protocol::kWelcome) + store_protocol::server_proof("secret", numbers));
  }
  EXPECT_EQ(served.client()->add("count", 1), 1);
}

/// The error of an attempt of half a second to connect to a port.
std::string trouble_at(const std::string& host, int port) {
  const auto start = Clock::now();
  const auto text = message_of<TimeoutError>([&] { StoreClient(host, port, "secret", start + 500ms); });
  EXPECT_LT(Clock::now() - start, 30s) << text;
  return text;
}

TEST(Store, GivesTheReasonWhyItCanNotBeReached) {
  EXPECT_THAT(trouble_at(kHost, free_port()), HasSubstr("Connection refused"));
  const int port = free_port();
  const auto silent = listener(port);
  EXPECT_THAT(trouble_at(kHost, port), AllOf(HasSubstr("something accepts connections there"), HasSubstr("it does not answer")));
  EXPECT_THAT(trouble_at("no-such-host.invalid", port), HasSubstr("the name 'no-such-host.invalid' can't be resolved"));
  // An attempt that begins when the time is up finds no better reason.
  const auto late = [&](const std::string&) { std::this_thread::sleep_for(300ms); };
  const int nobody = free_port();
  for (const auto* host : {kHost, "localhost"}) {
    EXPECT_THAT(message_of<TimeoutError>([&] { StoreClient(host, nobody, "secret", Clock::now() + 200ms, late); }),
                HasSubstr("Connection refused"));
  }
}

/// Answers each peer with these words, whatever the peer sends, and keeps what peers send.
class Impostor {
 public:
  explicit Impostor(std::string words) : words_(std::move(words)) {}
  ~Impostor() { stop(); }

  const int port = free_port();

  /// Ends it. Returns all that peers have said.
  std::string stop() {
    stop_ = true;
    stranger(port);
    if (server_.joinable()) server_.join();
    return heard_;
  }

 private:
  void serve() {
    while (!stop_) {
      const Fd peer(::accept(listener_.get(), nullptr, nullptr));
      say(peer, words_);
      heard_ += hear(peer, kGreeting + kProofBytes);
    }
  }

  const std::string words_;
  std::string heard_;
  const Fd listener_ = listener(port);
  std::atomic<bool> stop_ = false;
  std::thread server_{[this] { serve(); }};
};

TEST(Store, TakesNothingElseForAStore) {
  const Impostor web("HTTP/1.1 400 Bad Request\r\n\r\n"), newer("tessera store 4\n");
  EXPECT_THAT(trouble_at(kHost, web.port), HasSubstr("not a store of this version of Tessera"));
  EXPECT_THAT(trouble_at(kHost, newer.port), HasSubstr("one of another version of Tessera"));
}

TEST(Store, IsNotBelievedWithoutTheSecret) {
  const auto words =
      std::string(store_protocol::kHello) + random_secret() + std::string(store_protocol::kWelcome) + std::string(kProofBytes, 'x');
  Impostor impostor(words);
  EXPECT_THAT(trouble_at(kHost, impostor.port), HasSubstr("does not know the TESSERA_SECRET of this job"));
  EXPECT_THAT(impostor.stop(), AllOf(HasSubstr(std::string(store_protocol::kHello)), Not(HasSubstr("secret"))));
}

TEST(Store, WarnsIfAnybodyCanJoin) {
  const auto warnings_of_rank_0 = [](const std::string& host) {
    Warnings warnings;
    serve_or_join({.rank = 0, .world_size = 2}, {.host = host, .port = free_port()}, {.end = Clock::now() + 10s});
    return warnings.texts;
  };
  ::unsetenv("TESSERA_SECRET");
  EXPECT_THAT(warnings_of_rank_0("0.0.0.0"), ElementsAre(HasSubstr("there is no TESSERA_SECRET, so any process that reaches port")));
  EXPECT_THAT(warnings_of_rank_0(kHost), IsEmpty());
  ::setenv("TESSERA_SECRET", "secret", 1);
  EXPECT_THAT(warnings_of_rank_0("0.0.0.0"), IsEmpty());
  ::unsetenv("TESSERA_SECRET");
}

/// The local addresses of sockets that listen at a port, as the kernel lists them.
std::vector<std::string> listening_at(int port) {
  std::vector<std::string> addresses;
  for (const auto* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string number, local, remote, state;
      words >> number >> local >> remote >> state;
      const auto colon = local.find(':');
      if (state == "0A" && std::stoi(local.substr(colon + 1), nullptr, 16) == port) addresses.push_back(local.substr(0, colon));
    }
  }
  return addresses;
}

TEST(Store, ListensWhereItWasAskedTo) {
  const auto local = [](const std::string& host, bool one_host) {
    const int port = free_port();
    const auto socket = listen_at(host, port, one_host, Clock::now() + 10s);
    return listening_at(port);
  };
  const std::vector<std::string> loopback = {"0100007F"}, everywhere = {"00000000"};
  EXPECT_EQ(local("127.0.0.1", true), loopback);
  EXPECT_EQ(local("127.0.0.1", false), loopback);
  EXPECT_EQ(local("localhost", false).size(), 1);
  EXPECT_NE(local("localhost", false), everywhere);
  EXPECT_EQ(local("192.0.2.1", false), everywhere);  // an address that is not of this host
  EXPECT_THAT(message_of<CommError>([&] { local("no-such-host.invalid", false); }), HasSubstr("can't be resolved"));
  const int taken = free_port();
  const auto first = listen_at(kHost, taken, true, Clock::now() + 10s);
  EXPECT_THAT(message_of<CommError>([&] { listen_at(kHost, taken, true, Clock::now() + 10s); }),
              HasSubstr("the port is taken; choose another place by MASTER_ADDR and MASTER_PORT"));
}

}  // namespace
}  // namespace tessera::testing::store_test
