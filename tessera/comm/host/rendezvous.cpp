#include "tessera/comm/host/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <fstream>
#include <limits>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/envelope.h"

namespace tessera {
namespace {

constexpr int kDefaultPort = 29500;
constexpr auto kPoll = std::chrono::milliseconds(5);
constexpr auto kGrace = std::chrono::seconds(2);

struct Names {
  const char* rank;
  const char* world_size;
  const char* local_rank;
};
constexpr std::array<Names, 2> kLaunchers = {
    {{"RANK", "WORLD_SIZE", "LOCAL_RANK"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"}}};

int master_port() {
  return static_cast<int>(env_int("MASTER_PORT", 1, 65535).value_or(kDefaultPort));
}

StorePtr open_store(const Identity& identity, Clock::time_point end) {
  const auto where = env("TESSERA_STORE");
  if (where) {
    constexpr std::string_view kFile = "file:";
    if (!where->starts_with(kFile)) {
      throw ConfigError(fmt::format("TESSERA_STORE='{}' names no store; write file:/path/that/all/ranks/see", *where));
    }
    const auto path = where->substr(kFile.size());
    // c10d retries forever if it can't open the file.
    const Fd probe(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0644));
    if (!probe) {
      throw ConfigError(
          fmt::format("TESSERA_STORE={}: {}; the file must lie where every rank can create and write it", *where, std::strerror(errno)));
    }
    return c10::make_intrusive<c10d::FileStore>(path, identity.world_size);
  }
  const auto limit = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
  const auto host = env("MASTER_ADDR").value_or("127.0.0.1");
  // torchrun may already serve a store at that address; then no rank does.
  const bool agent_serves = env("TORCHELASTIC_USE_AGENT_STORE") == "True";
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(master_port());
  options.isServer = identity.rank == 0 && !agent_serves;
  options.numWorkers = identity.world_size;
  options.waitWorkers = false;
  options.timeout = limit;
  try {
    StorePtr store = c10::make_intrusive<c10d::TCPStore>(host, options);
    // A restarted job must not find the keys of the run before.
    return c10::make_intrusive<c10d::PrefixStore>("tessera/" + env("TORCHELASTIC_RESTART_COUNT").value_or("0"), store);
  } catch (const std::exception& error) {
    if (options.isServer) {
      throw CommError(fmt::format("rank 0 can't serve the store at {}:{}: {}. Is the port taken? MASTER_PORT names another", host,
                                  options.port, first_line(error)));
    }
    throw TimeoutError(
        fmt::format("rank {} found no store at {}:{} within {} s: {}. Rank 0 keeps it: has it started, and do MASTER_ADDR "
                    "and MASTER_PORT name it?",
                    identity.rank, host, options.port, std::chrono::duration<double>(limit).count(), first_line(error)));
  }
}

std::vector<std::string> exchange_now(c10d::Store& store, const Identity& identity, const std::string& topic, const std::string& own,
                                      Clock::time_point end) try {
  const auto key = [&](int rank) { return fmt::format("{}/{}", topic, rank); };
  if (store.add(key(identity.rank) + "/seen", 1) != 1) {
    throw CommError(
        fmt::format("rank {} is there already. Either two processes have RANK={}, or the store is left over from an earlier "
                    "run: give every run a fresh MASTER_PORT or file",
                    identity.rank, identity.rank));
  }
  store.set(key(identity.rank), own);
  std::vector<std::string> values;
  for (int rank = 0; rank < identity.world_size;) {
    if (store.check({key(rank)})) {
      values.push_back(store.get_to_str(key(rank)));
      rank++;
      continue;
    }
    if (Clock::now() >= end) {
      std::vector<int> missing;
      for (int other = rank; other < identity.world_size; other++) {
        if (!store.check({key(other)})) missing.push_back(other);
      }
      if (missing.empty()) continue;
      throw TimeoutError(
          fmt::format("start of rank {}: time is up, and {} of {} still missing; are all processes of the job running, with "
                      "the same WORLD_SIZE, MASTER_ADDR and MASTER_PORT?",
                      identity.rank, name_ranks(missing), identity.world_size));
    }
    std::this_thread::sleep_for(kPoll);
  }
  // Rank 0 may serve the store, so it must not continue, and perhaps end with an error, before the others have read.
  const auto have_read = topic + "/read";
  store.add(have_read, 1);
  while (identity.rank == 0 && store.add(have_read, 0) < identity.world_size && Clock::now() < end) {
    std::this_thread::sleep_for(kPoll);
  }
  return values;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {
  throw CommError(fmt::format("start of rank {}: the store is gone ({}); rank 0 keeps it and has probably ended: see what it said",
                              identity.rank, first_line(error)));
}

}  // namespace

std::optional<Identity> identity_from_environment() {
  constexpr int64_t kMost = std::numeric_limits<int>::max();
  for (const auto& names : kLaunchers) {
    const auto rank = env_int(names.rank, 0, kMost);
    const auto size = env_int(names.world_size, 1, kMost);
    if (!rank && !size) continue;
    if (!rank || !size) {
      const char* missing = rank ? names.world_size : names.rank;
      throw ConfigError(
          fmt::format("{} is set but {} is not; set both, or neither for a lone process", rank ? names.rank : names.world_size, missing));
    }
    if (*rank >= *size)
      throw ConfigError(fmt::format("{}={} does not exist in a world of {}={}", names.rank, *rank, names.world_size, *size));
    return Identity{.rank = static_cast<int>(*rank), .world_size = static_cast<int>(*size)};
  }
  return std::nullopt;
}

std::optional<int> local_rank_from_environment() {
  for (const auto& names : kLaunchers) {
    if (const auto rank = env_int(names.local_rank, 0, std::numeric_limits<int>::max())) return static_cast<int>(*rank);
  }
  return std::nullopt;
}

StorePtr store_from_environment(const Identity& identity, Clock::time_point end) {
  static std::mutex mutex;
  static StorePtr store;
  std::lock_guard lock(mutex);
  if (!store) store = open_store(identity, end);
  return store;
}

int next_round(const StorePtr& store, int rank) {
  struct Seen {
    c10::weak_intrusive_ptr<c10d::Store> store;  // keeps the address from being used again
    int rounds = 0;
  };
  static std::mutex mutex;
  static std::map<std::pair<c10d::Store*, int>, Seen> seen;
  std::lock_guard lock(mutex);
  return seen.try_emplace({store.get(), rank}, Seen{.store = c10::weak_intrusive_ptr<c10d::Store>(store)}).first->second.rounds++;
}

std::string host_id() {
  if (const auto given = env("TESSERA_HOST_ID")) return *given;
  std::array<char, HOST_NAME_MAX + 1> name{};
  ::gethostname(name.data(), HOST_NAME_MAX);
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}", name.data(), boot);
}

std::vector<std::string> exchange(const StorePtr& store, const Identity& identity, const std::string& topic, const std::string& own,
                                  Clock::time_point end) {
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(end - Clock::now());
  auto values = bounded(left + kGrace, [=] { return exchange_now(*store, identity, topic, own, end); });
  if (!values) {
    throw TimeoutError(
        fmt::format("start of rank {}: the store does not answer; rank 0 keeps it: is its host up and reachable?", identity.rank));
  }
  return std::move(*values);
}

std::string address_towards_master() {
  const auto host = env("MASTER_ADDR").value_or("127.0.0.1");
  addrinfo hints{};
  hints.ai_socktype = SOCK_DGRAM;  // connect() on it sends nothing, but selects the route
  addrinfo* found = nullptr;
  if (::getaddrinfo(host.c_str(), std::to_string(master_port()).c_str(), &hints, &found) != 0) return {};
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(found, &::freeaddrinfo);
  for (const auto* entry = found; entry != nullptr; entry = entry->ai_next) {
    const Fd socket(::socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC, entry->ai_protocol));
    if (!socket || ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    sockaddr_storage own{};
    socklen_t length = sizeof own;
    std::array<char, NI_MAXHOST> text{};
    if (::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&own), &length) == 0 &&
        ::getnameinfo(reinterpret_cast<sockaddr*>(&own), length, text.data(), text.size(), nullptr, 0, NI_NUMERICHOST) == 0) {
      return text.data();
    }
  }
  return {};
}

}  // namespace tessera
