#include "tessera/comm/host/addresses.h"

#include <dirent.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/comm/host/bounded.h"

namespace tessera {
namespace {

/// Returns the code of getaddrinfo(), and the addresses that it has found.
std::pair<int, std::shared_ptr<addrinfo>> look_up(const char* host, int port, int kind_of_socket, int flags = 0) {
  addrinfo hints{};
  hints.ai_socktype = kind_of_socket;
  hints.ai_flags = AI_PASSIVE | flags;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (code != 0) return {code, nullptr};
  return {code, std::shared_ptr<addrinfo>(found, &::freeaddrinfo)};
}

void set_tcp(int socket, int option, int value) {
  ::setsockopt(socket, IPPROTO_TCP, option, &value, sizeof value);
}

}  // namespace

Addresses addresses_of(const std::string& host, int port, int kind_of_socket, std::chrono::steady_clock::time_point end) {
  // A numeric address needs no name server, and so no time.
  if (auto found = look_up(host.c_str(), port, kind_of_socket, AI_NUMERICHOST).second) return {.first = std::move(found)};
  const auto result = bounded(time_until(end), [=] { return look_up(host.c_str(), port, kind_of_socket); });
  const auto why_not = [&](const char* reason) { return fmt::format("the name '{}' can't be resolved: {}", host, reason); };
  if (!result) return {.why_not = why_not("no name server answers")};
  if (result->first != 0) return {.why_not = why_not(::gai_strerror(result->first))};
  return {.first = result->second};
}

std::string numeric_address(const sockaddr* address, socklen_t length) {
  std::array<char, NI_MAXHOST> text{};
  return ::getnameinfo(address, length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0 ? text.data() : "";
}

std::string address_at(int socket, EndOfSocket end) {
  sockaddr_storage storage{};
  socklen_t length = sizeof storage;
  auto* const address = reinterpret_cast<sockaddr*>(&storage);
  return end(socket, address, &length) == 0 ? numeric_address(address, length) : "";
}

std::optional<std::chrono::seconds> silence_limit() {
  constexpr int64_t kUsual = 30, kDay = 86'400;
  static const std::chrono::seconds limit(env_int("TESSERA_SILENCE_LIMIT", 0, kDay).value_or(kUsual));
  return limit.count() > 0 ? std::optional(limit) : std::nullopt;
}

void keep_asking(int socket, std::chrono::seconds limit) {
  constexpr int kLongestPause = 5;
  const int seconds = static_cast<int>(limit.count());
  const int yes = 1, pause = std::max(std::clamp(seconds / 6, 1, kLongestPause), seconds / 100);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);
  set_tcp(socket, TCP_KEEPIDLE, pause);
  set_tcp(socket, TCP_KEEPINTVL, pause);
  set_tcp(socket, TCP_KEEPCNT, seconds / pause + 2);  // else the kernel would end the connection after nine pauses, before the limit
  // From Linux 6.15 on: what was lost is sent again at least this often, and not only after up to two minutes, so that a connection
  // continues soon after its network is back.
  constexpr int kTcpRtoMaxMs = 44, kTwoSeconds = 2000;
  set_tcp(socket, kTcpRtoMaxMs, kTwoSeconds);
}

void set_options(int socket) {
  const int yes = 1;
  ::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
  ::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &yes, sizeof yes);  // by the kernel's own limits, unless they are replaced below
  const auto limit = silence_limit();
  if (!limit) return;
  keep_asking(socket, *limit);
  const auto milliseconds = static_cast<unsigned>(std::chrono::milliseconds(*limit).count());
  ::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &milliseconds, sizeof milliseconds);
}

std::shared_ptr<addrinfo> own_addresses(int port) {
  return look_up(nullptr, port, SOCK_STREAM).second;
}

std::vector<int> open_descriptors() {
  std::vector<int> found;
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(::opendir("/proc/self/fd"), &::closedir);
  while (const auto* entry = folder ? ::readdir(folder.get()) : nullptr) found.push_back(std::atoi(entry->d_name));
  return found;
}

}  // namespace tessera
