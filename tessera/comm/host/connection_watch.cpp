#include "tessera/comm/host/connection_watch.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <utility>

#include "tessera/base/fd.h"
#include "tessera/base/quiet_thread.h"
#include "tessera/comm/host/addresses.h"

namespace tessera {
namespace {

constexpr auto kBetweenLooksAtSockets = std::chrono::seconds(1);
constexpr auto kDoubt = std::chrono::seconds(3);  // the delays of a busy network are shorter

bool is_tcp(int socket) {
  int protocol = 0;
  socklen_t length = sizeof protocol;
  return ::getsockopt(socket, SOL_SOCKET, SO_PROTOCOL, &protocol, &length) == 0 && protocol == IPPROTO_TCP;
}

uint64_t number_of_connection(int socket) {
  uint64_t number = 0;
  socklen_t length = sizeof number;
  return ::getsockopt(socket, SOL_SOCKET, SO_COOKIE, &number, &length) == 0 ? number : 0;
}

/// Whether the other kernel owes an answer, to data or to a question, and how long ago it gave the last one.
std::pair<bool, std::chrono::milliseconds> owes_an_answer(int socket) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return {};
  return {info.tcpi_unacked > 0 || info.tcpi_probes > 0, std::chrono::milliseconds(info.tcpi_last_ack_recv)};
}

}  // namespace

ConnectionWatch::Connections ConnectionWatch::connections() {
  Connections found;
  for (const int descriptor : open_descriptors()) {
    if (is_tcp(descriptor) && !address_at(descriptor, &::getpeername).empty()) found[descriptor] = number_of_connection(descriptor);
  }
  return found;
}

ConnectionWatch::ConnectionWatch(const Connections& before, std::chrono::seconds limit) : limit_(limit) {
  for (const auto& [descriptor, number] : connections()) {
    if (const auto known = before.find(descriptor); known != before.end() && known->second == number) continue;
    watched_.push_back({.descriptor = descriptor, .number = number, .host = address_at(descriptor, &::getpeername)});
    keep_asking(descriptor, limit_);
  }
  thread_ = quiet_thread([this] {
    for (std::unique_lock lock(mutex_); !stop_; changed_.wait_for(lock, kBetweenLooksAtSockets)) look();
  });
}

ConnectionWatch::~ConnectionWatch() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

std::string ConnectionWatch::own_address() const {
  const std::lock_guard lock(mutex_);
  return watched_.empty() ? "" : address_at(watched_.front().descriptor, &::getsockname);
}

void ConnectionWatch::set_addresses(std::vector<std::string> addresses) {
  const std::lock_guard lock(mutex_);
  addresses_ = std::move(addresses);
}

void ConnectionWatch::look() {
  in_doubt_ = false;
  const auto now = Clock::now();
  std::erase_if(watched_, [&](Watched& each) {
    // The duplicate stays this connection even if its owner closes the descriptor in this moment.
    const Fd socket(::fcntl(each.descriptor, F_DUPFD_CLOEXEC, 0));
    if (number_of_connection(socket.get()) != each.number) return true;  // its owner has closed it
    const auto [owes, since] = owes_an_answer(socket.get());
    if (!owes || since < 2 * kBetweenLooksAtSockets) each.answered = now;
    const auto silent = now - each.answered;
    if (silent < limit_) {
      in_doubt_ |= silent >= kDoubt;
      return false;
    }
    silent_host_ = each.host;
    ::shutdown(socket.get(), SHUT_RDWR);
    return true;
  });
}

std::optional<LinkFailure> ConnectionWatch::failure() {
  const auto end = Clock::now() + limit_;
  std::unique_lock lock(mutex_);
  while (silent_host_.empty() && in_doubt_ && Clock::now() < end) {
    lock.unlock();
    std::this_thread::sleep_for(kBetweenLooksAtSockets / 10);
    lock.lock();
  }
  if (silent_host_.empty()) return std::nullopt;
  LinkFailure failure{.kind = LinkFailure::Kind::Gone};
  for (int rank = 0; rank < std::ssize(addresses_); rank++) {
    if (addresses_[rank] == silent_host_) failure.ranks.push_back(rank);
  }
  failure.reason =
      fmt::format("{} been silent for {} s (host {})", failure.ranks.size() > 1 ? "have" : "has", limit_.count(), silent_host_);
  return failure;
}

}  // namespace tessera
