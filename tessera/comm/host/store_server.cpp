#include "tessera/comm/host/store_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/base/secret.h"
#include "tessera/comm/host/addresses.h"

namespace tessera {
namespace {

using namespace store_protocol;

constexpr auto kHelloLimit = std::chrono::seconds(5);
constexpr auto kAcceptPause = std::chrono::milliseconds(100);  // between two attempts to accept when no descriptors are left

/// How many strangers may wait at a time. Those that have said hello may be all ranks of a large job, but leave most descriptors to it.
int64_t most_strangers(bool has_said_hello) {
  if (!has_said_hello) return 64;
  rlimit descriptors{};
  ::getrlimit(RLIMIT_NOFILE, &descriptors);
  return static_cast<int64_t>(std::min<rlim_t>(1024, descriptors.rlim_cur / 4));
}

/// The number in a text, 0 if there is none. Unsigned, so that sums of numbers that clients send can't overflow.
uint64_t number_in(const std::string& text) {
  return static_cast<uint64_t>(std::strtoll(text.c_str(), nullptr, 10));
}

bool is_loopback(const sockaddr* address) {
  if (address->sa_family == AF_INET) {
    return ntohl(reinterpret_cast<const sockaddr_in*>(address)->sin_addr.s_addr) >> 24 == 127;
  }
  return address->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr);
}

/// Whether `host` is a name other than localhost, and not an address.
bool is_host_name(const std::string& host) {
  std::array<char, sizeof(in6_addr)> ignored{};
  return host != "localhost" && ::inet_pton(AF_INET, host.c_str(), ignored.data()) != 1 &&
         ::inet_pton(AF_INET6, host.c_str(), ignored.data()) != 1;
}

Fd try_to_listen(const addrinfo& where) {
  Fd socket(::socket(where.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const int yes = 1;
  if (!socket || ::setsockopt(socket.get(), SOL_SOCKET, SO_REUSEADDR, &yes, sizeof yes) != 0) return {};
  if (::bind(socket.get(), where.ai_addr, where.ai_addrlen) != 0 || ::listen(socket.get(), SOMAXCONN) != 0) return {};
  return socket;
}

}  // namespace

Fd listen_at(const std::string& host, int port, bool one_host, std::chrono::steady_clock::time_point end) {
  const auto refuse = [&](const std::string& why) {
    return CommError(
        "rank 0 can't serve the store at {}:{}: {}; choose another place by MASTER_ADDR and MASTER_PORT, or by "
        "--main-process-port of tessera launch",
        host, port, why);
  };
  const auto asked = addresses_of(host, port, SOCK_STREAM, end);
  if (!asked.first) throw refuse(asked.why_not);
  // A host may resolve its own name to a loopback address, which other hosts can't reach.
  const bool only_own = is_loopback(asked.first->ai_addr);
  if (one_host || !only_own || !is_host_name(host)) {
    for (const auto* each = asked.first.get(); each != nullptr; each = each->ai_next) {
      if (auto socket = try_to_listen(*each)) return socket;
      if (errno == EADDRINUSE) throw refuse("the port is taken");
    }
  }
  // The other ranks may reach this host by an address that none of its interfaces has, as in clusters that forward ports.
  const auto everywhere = own_addresses(port);
  if (auto socket = everywhere ? try_to_listen(*everywhere) : Fd()) return socket;
  throw refuse(errno == EADDRINUSE ? "the port is taken" : std::strerror(errno));
}

bool is_open_to_hosts(const Fd& listener) {
  sockaddr_storage address{};
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  return ::getsockname(listener.get(), any, &length) == 0 && !is_loopback(any);
}

StoreServer::StoreServer(Fd listener, std::string secret)
    : listener_(std::move(listener)), secret_(std::move(secret)), stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!stop_) throw IoError("can't make an event for the store: {}", std::strerror(errno));
  silence_limit();  // throws here, and not in the thread
  thread_ = quiet_thread([this] { serve(); });
}

StoreServer::~StoreServer() {
  ::eventfd_write(stop_.get(), 1);
  thread_.join();
}

void StoreServer::serve() {
  for (;;) {
    const bool accepts = Clock::now() >= accepts_from_;
    std::vector<pollfd> sources = {{.fd = stop_.get(), .events = POLLIN, .revents = 0},
                                   {.fd = accepts ? listener_.get() : -1, .events = POLLIN, .revents = 0}};
    bool waits = !accepts;
    for (const auto& peer : peers_) {
      const short events = peer.out.empty() ? POLLIN : POLLIN | POLLOUT;
      sources.push_back({.fd = peer.socket.get(), .events = events, .revents = 0});
      waits |= !peer.admitted;
    }
    constexpr int kLookMs = 100;  // how often time limits are checked
    ::poll(sources.data(), sources.size(), waits ? kLookMs : -1);
    if (sources[0].revents != 0) return;
    size_t place = 2;
    for (auto& peer : peers_) {
      if (sources[place++].revents != 0) read(peer);
    }
    for (auto& peer : peers_) {
      flush(peer);
      if (!peer.admitted && Clock::now() > peer.since + kHelloLimit) peer.gone = true;
    }
    peers_.remove_if([](const Peer& peer) { return peer.gone; });
    if (sources[1].revents != 0) accept_peers();
  }
}

void StoreServer::accept_peers() {
  constexpr int kMostAtOnce = 64;  // then the connected peers have their turn
  for (int i = 0; i < kMostAtOnce; i++) {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    const bool no_room = !socket && (errno == EMFILE || errno == ENFILE);
    if (!socket && !no_room) return;
    if (socket) {
      set_options(socket.get());
      auto& peer = peers_.emplace_back(Peer{.socket = std::move(socket)});
      read(peer);  // a rank sends its hello at once, so it may be there already
    }
    limit_strangers();
    if (!no_room) continue;
    accepts_from_ = Clock::now() + kAcceptPause;  // until then, poll() would report the listener as readable without end
    return;
  }
}

/// Hangs up on the oldest strangers (peers that are not admitted yet) if there are many, so that they leave room for the ranks. Counts
/// those that have said hello apart from the others, so that port scanners don't push out a rank that has still to send its proof.
void StoreServer::limit_strangers() {
  for (const bool has_said_hello : {false, true}) {
    const auto is_stranger = [&](const Peer& peer) { return !peer.admitted && peer.numbers.client.empty() != has_said_hello; };
    auto strangers = std::ranges::count_if(peers_, is_stranger);
    const auto most = most_strangers(has_said_hello);
    peers_.remove_if([&](const Peer& peer) { return peer.gone || (is_stranger(peer) && strangers-- > most); });
  }
}

void StoreServer::read(Peer& peer) try {
  std::array<char, 65536> buffer;
  for (;;) {
    const auto count = ::recv(peer.socket.get(), buffer.data(), buffer.size(), 0);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      peer.gone |= count == 0 || errno != EAGAIN;
      break;
    }
    peer.in.append(buffer.data(), count);
    if (peer.in.size() > 2 * kLongestFrame) peer.gone = true;  // no client sends so much ahead of the answers
    if (!peer.admitted) admit(peer);
    if (peer.gone) return;
  }
  while (peer.admitted) {
    auto request = take_sized(peer.in, kLongestFrame);
    if (!request) break;
    answer(peer, unpack(*request));
  }
} catch (const Error&) {  // the peer does not keep to the protocol
  peer.gone = true;
}

/// Answers the hello of a peer, once it is complete.
void StoreServer::greet(Peer& peer) {
  const auto begin = peer.in.substr(0, kAnyVersion.size());
  peer.gone = begin != kAnyVersion.substr(0, begin.size());
  if (peer.gone || peer.in.size() < kHello.size()) return;
  if (!peer.in.starts_with(kHello)) {
    if (!std::exchange(has_met_other_version_, true)) {
      log(LogLevel::Warning, "the store of this job has turned away a process of another version of Tessera");
    }
    peer.out += kHello;
    flush(peer);
    peer.gone = true;
    return;
  }
  if (peer.in.size() < kHello.size() + kNumberBytes) return;
  peer.numbers = {.client = peer.in.substr(kHello.size(), kNumberBytes), .server = random_secret()};
  peer.in.erase(0, kHello.size() + kNumberBytes);
  peer.out += std::string(kHello) + peer.numbers.server;
  flush(peer);
}

void StoreServer::admit(Peer& peer) {
  if (peer.numbers.client.empty()) return greet(peer);
  if (peer.in.size() < kProofBytes) return;
  peer.admitted = same_proof(peer.in.substr(0, kProofBytes), client_proof(secret_, peer.numbers));
  peer.in.erase(0, kProofBytes);
  if (!peer.admitted && !std::exchange(has_refused_, true)) {
    log(LogLevel::Warning, "the store of this job has refused a process with another TESSERA_SECRET");
  }
  peer.out += peer.admitted ? std::string(kWelcome) + server_proof(secret_, peer.numbers) : std::string(kRefused);
  flush(peer);
  peer.gone |= !peer.admitted;
}

void StoreServer::answer(Peer& peer, Fields request) {
  const auto done = [&](std::string_view value) { peer.out += sized(value); };
  const auto is = [&](std::string_view verb, size_t fields) {
    if (request.empty() || request.front() != verb) return false;
    if (request.size() < fields) throw IoError("a request without its arguments");
    return true;
  };
  if (is(kSet, 3)) {
    values_[request[1]] = std::move(request[2]);
    done("");
  } else if (is(kGet, 2)) {
    const auto found = values_.find(request[1]);
    done(found == values_.end() ? "" : found->second);
  } else if (is(kAdd, 3)) {
    auto& value = values_[request[1]];
    value = std::to_string(static_cast<int64_t>(number_in(value) + number_in(request[2])));
    done(value);
  } else if (is(kCompareSet, 4)) {
    const auto found = values_.find(request[1]);
    const bool fits = found == values_.end() ? request[2].empty() : found->second == request[2];
    if (fits) values_[request[1]] = request[3];
    done(fits ? request[3] : found == values_.end() ? request[2] : found->second);
  } else if (is(kCheck, 1)) {
    done(std::all_of(request.begin() + 1, request.end(), [&](const auto& key) { return values_.contains(key); }) ? "1" : "0");
  } else if (is(kDelete, 2)) {
    done(values_.erase(request[1]) > 0 ? "1" : "0");
  } else if (is(kCount, 1)) {
    done(std::to_string(values_.size()));
  } else {
    throw IoError("a request that does not exist");
  }
}

void StoreServer::flush(Peer& peer) {
  while (!peer.out.empty()) {
    const auto count = ::send(peer.socket.get(), peer.out.data(), peer.out.size(), MSG_NOSIGNAL);
    if (count < 0 && errno == EINTR) continue;
    if (count < 0) {
      peer.gone |= errno != EAGAIN;
      return;
    }
    peer.out.erase(0, count);
  }
}

}  // namespace tessera
