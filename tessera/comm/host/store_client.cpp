#include "tessera/comm/host/store_client.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>
#include <optional>
#include <stdexcept>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/base/secret.h"
#include "tessera/comm/host/addresses.h"

namespace tessera {
namespace {

using namespace store_protocol;
using Clock = StoreClient::Clock;

constexpr auto kPause = std::chrono::milliseconds(50);      // between two attempts to connect
constexpr auto kAttempt = std::chrono::milliseconds(5000);  // the time limit of connecting to one address
constexpr auto kAnswer = std::chrono::milliseconds(70000);  // the time limit of an answer, unless setTimeout() sets a shorter one
constexpr std::chrono::microseconds kLongestPause(5000);     // between two checks for the keys that wait() waits for

/// Why an attempt to connect failed.
struct NoConnection {
  std::string why;
};

/// Waits until the socket is ready, but not beyond `end`.
bool is_ready(int socket, short events, Clock::time_point end) {
  for (;;) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
    pollfd source{.fd = socket, .events = events, .revents = 0};
    const int count = ::poll(&source, 1, std::max(0, static_cast<int>(std::min<int64_t>(left.count(), INT32_MAX))));
    if (count > 0) return true;
    if (count == 0 || errno != EINTR) return false;
  }
}

/// Throws NoConnection if the peer hangs up or `end` comes first.
void send_all(int socket, std::string_view bytes, Clock::time_point end) {
  while (!bytes.empty()) {
    if (!is_ready(socket, POLLOUT, end)) throw NoConnection{"it accepts no data"};
    const auto count = ::send(socket, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count < 0) throw NoConnection{std::strerror(errno)};
    bytes.remove_prefix(count);
  }
}

void receive_some(int socket, std::string& into, Clock::time_point end, size_t most = 65536) {
  std::array<char, 65536> buffer;
  for (;;) {
    if (!is_ready(socket, POLLIN, end)) throw NoConnection{"it does not answer"};
    const auto count = ::recv(socket, buffer.data(), std::min(most, buffer.size()), 0);
    if (count < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (count == 0) throw NoConnection{"it hangs up"};
    if (count < 0) throw NoConnection{std::strerror(errno)};
    into.append(buffer.data(), count);
    return;
  }
}

Fd connected_to(const addrinfo& address, Clock::time_point end) {
  Fd socket(::socket(address.ai_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket) throw NoConnection{std::strerror(errno)};
  if (::connect(socket.get(), address.ai_addr, address.ai_addrlen) != 0) {
    if (errno != EINPROGRESS) throw NoConnection{std::strerror(errno)};
    if (!is_ready(socket.get(), POLLOUT, end)) throw NoConnection{"nothing answers there"};
    int error = 0;
    socklen_t length = sizeof error;
    ::getsockopt(socket.get(), SOL_SOCKET, SO_ERROR, &error, &length);
    if (error != 0) throw NoConnection{std::strerror(error)};
  }
  set_options(socket.get());
  return socket;
}

std::string receive(int socket, size_t bytes, Clock::time_point end) {
  std::string received;
  while (received.size() < bytes) receive_some(socket, received, end, bytes - received.size());
  return received;
}

/// Proves to the store that this process knows the secret, and has the store prove the same. Throws ConfigError if this process's secret is
/// wrong, NoConnection if the other side is not the store of this job.
void introduce(int socket, const std::string& secret, Clock::time_point end) {
  Numbers numbers{.client = random_secret(), .server = {}};
  std::string answer, proof;
  try {
    send_all(socket, std::string(kHello) + numbers.client, end);
    answer = receive(socket, kHello.size(), end);
    if (answer == kHello) {
      numbers.server = receive(socket, kNumberBytes, end);
      send_all(socket, client_proof(secret, numbers), end);
      answer = receive(socket, kWelcome.size(), end);
      if (answer == kWelcome) proof = receive(socket, kProofBytes, end);
    }
  } catch (const NoConnection& failure) {
    throw NoConnection{
        fmt::format("something accepts connections there, but {}, so it is not a store of this version of Tessera", failure.why)};
  }
  if (answer == kRefused) {
    throw ConfigError("the store has refused this process, whose TESSERA_SECRET is another one; set the same one for every rank");
  }
  if (answer.starts_with(kAnyVersion)) throw NoConnection{"the store there is one of another version of Tessera"};
  if (answer != kWelcome) throw NoConnection{"the process that answers there is not a store of this version of Tessera"};
  if (!same_proof(proof, server_proof(secret, numbers))) {
    throw NoConnection{"the process that answers there does not know the TESSERA_SECRET of this job, so it is not its store"};
  }
}

Fd connect_once(const std::string& host, int port, const std::string& secret, Clock::time_point end) {
  std::optional<NoConnection> trouble;
  std::exception_ptr refusal;
  const auto addresses = addresses_of(host, port, SOCK_STREAM, end);
  if (!addresses.first) throw NoConnection{addresses.why_not};
  for (const auto* address = addresses.first.get(); address != nullptr; address = address->ai_next) {
    const auto own_end = std::min(end, Clock::now() + kAttempt);
    try {
      auto socket = connected_to(*address, own_end);
      introduce(socket.get(), secret, own_end);
      return socket;
    } catch (const NoConnection& failure) {
      const auto numeric = numeric_address(address->ai_addr, address->ai_addrlen);
      trouble = NoConnection{numeric == host ? failure.why : fmt::format("{} ({})", failure.why, numeric)};
    } catch (const ConfigError&) {  // perhaps by another job's store, and this job's is at a further address
      refusal = std::current_exception();
    }
  }
  if (refusal) std::rethrow_exception(refusal);
  throw trouble.value_or(NoConnection{"the name has no address"});
}

}  // namespace

StoreClient::StoreClient(std::string host, int port, std::string secret, Clock::time_point end,
                         const std::function<void(const std::string& why)>& on_failure)
    : host_(std::move(host)), port_(port), secret_(std::move(secret)) {
  for (std::string why;;) {
    try {
      socket_ = connect_once(host_, port_, secret_, end);
      host_ = address_at(socket_.get(), &::getpeername);  // so that further connections do not depend on a name server
      return;
    } catch (const NoConnection& failure) {
      // An attempt that has run out of time says less than the attempt before it.
      if (why.empty() || Clock::now() < end) why = failure.why;
      if (Clock::now() + kPause >= end) throw TimeoutError(why);
      on_failure(why);
    }
    std::this_thread::sleep_for(kPause);
  }
}

c10::intrusive_ptr<c10d::Store> StoreClient::clone() {
  auto other = c10::make_intrusive<StoreClient>(host_, port_, secret_, Clock::now() + kAttempt);
  other->setTimeout(timeout_);
  return other;
}

std::string StoreClient::request(const Fields& fields) {
  const std::lock_guard lock(mutex_);
  if (!socket_) throw std::runtime_error("the connection to the store was lost before");
  try {
    const auto end = Clock::now() + std::min(timeout_, kAnswer);
    send_all(socket_.get(), pack(fields), end);
    for (;;) {
      if (auto answer = take_sized(received_, kLongestFrame)) return *answer;
      receive_some(socket_.get(), received_, end);
    }
  } catch (const NoConnection& failure) {
    socket_ = Fd();
    throw std::runtime_error(fmt::format("the connection to the store is lost: {}", failure.why));
  } catch (const IoError&) {
    socket_ = Fd();  // the next bytes could be the rest of that answer
    throw;
  }
}

void StoreClient::set(const std::string& key, const std::vector<uint8_t>& value) {
  request({kSet, key, std::string(value.begin(), value.end())});
}

std::vector<uint8_t> StoreClient::compareSet(const std::string& key, const std::vector<uint8_t>& expected,
                                             const std::vector<uint8_t>& desired) {
  const auto value =
      request({kCompareSet, key, std::string(expected.begin(), expected.end()), std::string(desired.begin(), desired.end())});
  return {value.begin(), value.end()};
}

std::vector<uint8_t> StoreClient::get(const std::string& key) {
  wait({key}, timeout_);
  const auto value = request({kGet, key});
  return {value.begin(), value.end()};
}

int64_t StoreClient::add(const std::string& key, int64_t value) {
  return std::stoll(request({kAdd, key, std::to_string(value)}));
}

bool StoreClient::deleteKey(const std::string& key) {
  return request({kDelete, key}) == "1";
}

bool StoreClient::check(const std::vector<std::string>& keys) {
  Fields fields = {kCheck};
  fields.insert(fields.end(), keys.begin(), keys.end());
  return request(fields) == "1";
}

int64_t StoreClient::getNumKeys() {
  return std::stoll(request({kCount}));
}

void StoreClient::wait(const std::vector<std::string>& keys, const std::chrono::milliseconds& timeout) {
  const auto end = Clock::now() + timeout;
  for (std::chrono::microseconds pause(100); !check(keys); pause = std::min(2 * pause, kLongestPause)) {
    if (Clock::now() >= end) throw TimeoutError("nobody has set '{}' in the store within {} ms", keys.back(), timeout.count());
    std::this_thread::sleep_for(pause);
  }
}

}  // namespace tessera
