// What strangers and members say to the store that rank 0 serves: the server must outlive it all.
#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <cstdlib>

#include "fuzz.h"
#include "tessera/base/port.h"
#include "tessera/base/secret.h"
#include "tessera/comm/host/store_server.h"

namespace tessera::fuzz {
namespace {

constexpr auto kSecret = "secret";

int port() {
  static const int number = free_port();
  static StoreServer server(listen_at("127.0.0.1", number, true, std::chrono::steady_clock::now() + std::chrono::seconds(10)), kSecret);
  return number;
}

Fd connected() {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(static_cast<uint16_t>(port()));
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  if (::connect(socket.get(), reinterpret_cast<sockaddr*>(&address), sizeof address) != 0) std::abort();
  return socket;
}

/// Sends the bytes and reads until the server has answered, hung up, or shown that it waits for more.
void say(const Fd& socket, std::string_view bytes) {
  [[maybe_unused]] const auto sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  ::shutdown(socket.get(), SHUT_WR);
  char buffer[4096];
  while (::recv(socket.get(), buffer, sizeof buffer, 0) > 0) {
  }
}

/// A connection of a process that has proved that it knows the secret.
Fd member() {
  using namespace store_protocol;
  Fd socket = connected();
  const auto hear = [&](size_t bytes) {
    std::string heard(bytes, '\0');
    if (::recv(socket.get(), heard.data(), bytes, MSG_WAITALL) != static_cast<ssize_t>(bytes)) std::abort();
    return heard;
  };
  Numbers numbers{.client = random_secret(), .server = {}};
  const auto hello = std::string(kHello) + numbers.client;
  if (::send(socket.get(), hello.data(), hello.size(), MSG_NOSIGNAL) < 0) std::abort();
  numbers.server = hear(kHello.size() + kNumberBytes).substr(kHello.size());
  const auto proof = client_proof(kSecret, numbers);
  if (::send(socket.get(), proof.data(), proof.size(), MSG_NOSIGNAL) < 0) std::abort();
  if (hear(kWelcome.size() + kProofBytes) != std::string(kWelcome) + server_proof(kSecret, numbers)) std::abort();
  return socket;
}

/// The first byte says whether a stranger or a member says the rest.
void read_store(std::span<const uint8_t> data) {
  if (data.empty()) return;
  const std::string_view words(reinterpret_cast<const char*>(data.data()) + 1, data.size() - 1);
  say(data.front() % 2 == 0 ? connected() : member(), words);
}

std::vector<std::string> seeds_of_store() {
  using namespace store_protocol;
  const std::string stranger(1, '\0'), member(1, '\1'), hello = stranger + std::string(kHello) + random_secret();
  return {member + pack({"set", "key", "value"}) + pack({"get", "key"}) + pack({"check", "key", "other"}),
          member + pack({"add", "count", "3"}) + pack({"add", "count", "-9223372036854775808"}) + pack({"add", "count", "-1"}),
          member + pack({"compare", "key", "", "value"}) + pack({"count"}) + pack({"delete", "key"}),
          member + pack({}) + pack({""}) + pack({"set"}),
          member + std::string("\xff\xff\xff\xff", 4),
          hello,
          hello + std::string(kProofBytes, 'x') + pack({"set", "key", "value"}),
          stranger + "tessera store 2\n",
          stranger + "GET / HTTP/1.1\r\n\r\n",
          ""};
}

const Target target_store("store", read_store, seeds_of_store);

}  // namespace
}  // namespace tessera::fuzz
