#include "tessera/comm/host/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <netdb.h>
#include <sys/file.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>
#include <mutex>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>
#include <utility>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/log.h"
#include "tessera/base/process.h"
#include "tessera/base/secret.h"
#include "tessera/base/words.h"
#include "tessera/comm/host/addresses.h"
#include "tessera/comm/host/bounded.h"
#include "tessera/comm/host/store_client.h"
#include "tessera/comm/host/store_server.h"

namespace tessera {
namespace {

constexpr auto kPoll = std::chrono::milliseconds(5);
constexpr auto kGrace = std::chrono::seconds(2);
constexpr size_t kMostNamed = 64;  // how many missing ranks an error names: each costs a request to the store

/// Throws ConfigError if the file holds something else than keys and values as c10d writes them. c10d itself would trust any length in it.
void expect_store(const Fd& file, const std::string& where) {
  ::flock(file.get(), LOCK_SH);
  const auto end = ::lseek(file.get(), 0, SEEK_END);
  off_t place = 0;
  bool is_key = true;  // a key and its value take turns, and no key is empty
  for (uint32_t length = 0; place >= 0 && place < end; is_key = !is_key) {
    const bool whole = ::pread(file.get(), &length, sizeof length, place) == sizeof length;
    const auto room = static_cast<uint64_t>(end - place) - sizeof length;
    const bool fits = whole && length <= room && (length > 0 || !is_key);
    place = fits ? place + static_cast<off_t>(sizeof length + length) : -1;
  }
  ::flock(file.get(), LOCK_UN);
  if (place != end) throw ConfigError("TESSERA_STORE={} holds something else than a store; name a file that does not exist yet", where);
}

/// The destructor of c10d's store reads the file once more, and an error there would end the process.
class OwnFileStore : public c10d::FileStore {
 public:
  using FileStore::FileStore;
  ~OwnFileStore() override {
    try {
      if (::access(path_.c_str(), F_OK) == 0) leave();
    } catch (const std::exception&) {  // ignored, because another error may already end this process; the file stays
    }
    path_.clear();  // nothing is left for c10d's destructor
  }
  c10::intrusive_ptr<Store> clone() override { return c10::make_intrusive<OwnFileStore>(path_, numWorkers_); }

 private:
  /// Does the work of c10d's destructor: the last user removes the file.
  void leave() {
    const auto gone = addHelper(cleanupKey_, 1), users = addHelper(refCountKey_, -1);
    if (users == 0 && numWorkers_ >= 0 && gone >= numWorkers_) ::unlink(path_.c_str());
  }
};

StorePtr file_store(const std::string& where, const Identity& identity, Clock::time_point end) {
  constexpr std::string_view kFile = "file:";
  if (!where.starts_with(kFile)) {
    throw ConfigError("TESSERA_STORE='{}' is not the name of a store; write file:/path/that/all/ranks/see", where);
  }
  const auto path = where.substr(kFile.size());
  const auto open_it = [=]() -> StorePtr {
    // c10d retries forever if it can't open the file.
    const Fd file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0644));
    struct stat status = {};
    if (!file || ::fstat(file.get(), &status) != 0) {
      throw ConfigError("TESSERA_STORE={}: {}; name a file that every rank can create and write", where, std::strerror(errno));
    }
    if (!S_ISREG(status.st_mode)) throw ConfigError("TESSERA_STORE={} is not a file; name one that does not exist yet", where);
    expect_store(file, where);
    return c10::make_intrusive<OwnFileStore>(path, identity.world_size);
  };
  auto store = bounded(time_until(end) + kGrace, open_it);
  if (!store) throw TimeoutError("TESSERA_STORE={}: the file system does not answer, or another process holds a lock on the file", where);
  return *store;
}

/// The store that torchrun serves.
StorePtr agent_store(const Identity& identity, const MeetingPoint& point, Clock::time_point end) {
  c10d::TCPStoreOptions options;
  options.port = static_cast<uint16_t>(point.port);
  options.numWorkers = identity.world_size;
  options.waitWorkers = false;
  options.timeout = time_until(end);
  // A server that accepts connections and never answers would keep c10d waiting without end.
  auto store = bounded(options.timeout + kGrace, [=]() -> StorePtr { return c10::make_intrusive<c10d::TCPStore>(point.host, options); });
  if (!store) throw TimeoutError("something accepts connections there, but does not answer as torchrun does");
  return *store;
}

/// "290 s"
std::string time_left(Clock::time_point end) {
  return fmt::format("{:.3g} s", std::chrono::duration<double>(time_until(end)).count());
}

bool torchrun_serves() {
  return env("TORCHELASTIC_USE_AGENT_STORE") == "True";
}

StorePtr open_store(const Identity& identity, const StartWait& wait) {
  const auto end = wait.end;
  if (const auto where = env("TESSERA_STORE")) return file_store(*where, identity, end);
  const auto point = meeting_point();
  const auto place = fmt::format("{}:{}", point.host, point.port);
  const bool agent_serves = torchrun_serves();
  const auto limit = std::chrono::duration<double>(end - Clock::now()).count();
  try {
    const auto store = agent_serves ? agent_store(identity, point, end) : serve_or_join(identity, point, wait);
    // A restarted job must not find the keys of the run before.
    return c10::make_intrusive<c10d::PrefixStore>("tessera/" + env("TORCHELASTIC_RESTART_COUNT").value_or("0"), store);
  } catch (const TimeoutError& error) {
    throw TimeoutError(
        "rank {} found no store at {} within {:.1f} s: {}. {} keeps the store: has it started, and do MASTER_ADDR and "
        "MASTER_PORT lead to it?",
        identity.rank, place, limit, error.what(), agent_serves ? "torchrun" : "Rank 0");
  } catch (const ConfigError& error) {
    throw ConfigError("rank {}, at {}: {}", identity.rank, place, error.what());
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw CommError("rank {} found no store at {}: {}", identity.rank, place, first_line(error));
  }
}

std::vector<std::string> exchange_now(c10d::Store& store, const Identity& identity, const std::string& topic, const std::string& own,
                                      const StartWait& wait) try {
  const auto key = [&](int rank) { return fmt::format("{}/{}", topic, rank); };
  if (store.add(key(identity.rank) + "/seen", 1) != 1) {
    throw CommError(
        "rank {} has already joined. Either two processes have RANK={}, or the store is left over from an earlier "
        "run: give every run a fresh MASTER_PORT or file",
        identity.rank, identity.rank);
  }
  store.set(key(identity.rank), own);
  std::vector<std::string> values;
  bool warned = false;
  for (int rank = 0; rank < identity.world_size;) {
    if (store.check({key(rank)})) {
      values.push_back(store.get_to_str(key(rank)));
      rank++;
      continue;
    }
    const bool late = Clock::now() >= wait.end, due = Clock::now() >= wait.notice && !warned;
    if (late || due) {
      std::vector<int> missing;
      for (int other = rank; other < identity.world_size && missing.size() < kMostNamed; other++) {
        if (!store.check({key(other)})) missing.push_back(other);
      }
      if (missing.empty()) continue;
      const auto who =
          fmt::format("{}{} of {}", name_ranks(missing), missing.size() < kMostNamed ? "" : " and perhaps more", identity.world_size);
      if (late) {
        throw TimeoutError(
            "start of rank {}: time is up, and {} still missing; are all processes of the job running, with "
            "the same WORLD_SIZE{}?",
            identity.rank, who, env("TESSERA_STORE") ? " and TESSERA_STORE" : ", MASTER_ADDR and MASTER_PORT");
      }
      warned = true;
      // Of the ranks that have joined, the first one warns for all.
      int first = rank > 0 ? 0 : 1;
      while (first < identity.rank && !store.check({key(first)})) first++;
      if (first == identity.rank)
        log(LogLevel::Warning, "waiting for {} to join {}; giving up in {}", who, wait.place, time_left(wait.end));
    }
    std::this_thread::sleep_for(kPoll);
  }
  // Rank 0 may serve the store, so it must not continue, and perhaps end with an error, before the other ranks have read the values.
  const auto have_read = topic + "/read";
  store.add(have_read, 1);
  while (identity.rank == 0 && store.add(have_read, 0) < identity.world_size && Clock::now() < wait.end) {
    std::this_thread::sleep_for(kPoll);
  }
  return values;
} catch (const Error&) {
  throw;
} catch (const std::exception& error) {
  throw CommError(
      "start of rank {}: the store is gone ({}); rank 0, which keeps it, has ended or has another WORLD_SIZE: see its output",
      identity.rank, first_line(error));
}

}  // namespace

StorePtr serve_or_join(const Identity& identity, const MeetingPoint& point, const StartWait& wait) {
  static std::optional<StoreServer> server;                                     // serves until the process ends
  if (identity.world_size == 1) return c10::make_intrusive<c10d::HashStore>();  // there is nobody to meet
  const auto given = given_secret();
  const auto secret = given.value_or(point.job);
  if (identity.rank == 0) {
    auto listener = listen_at(point.host, point.port, point.one_host, wait.end);
    if (!given && is_open_to_hosts(listener)) {
      log(LogLevel::Warning,
          "there is no TESSERA_SECRET, so any process that reaches port {} of this host can join the job; set the same random text on all "
          "hosts, or TESSERA_SECRET_FILE",
          point.port);
    }
    server.emplace(std::move(listener), secret);
  }
  const auto warn_once = [&, warned = false](const std::string& why) mutable {
    if (Clock::now() < wait.notice || std::exchange(warned, true)) return;
    log(LogLevel::Warning, "can't reach the store {}: {}; trying for {} more", wait.place, why, time_left(wait.end));
  };
  return c10::make_intrusive<StoreClient>(point.host, point.port, secret, wait.end, warn_once);
}

StorePtr store_from_environment(const Identity& identity, const StartWait& wait) {
  static std::mutex mutex;
  static StorePtr store;
  std::lock_guard lock(mutex);
  if (!store) store = open_store(identity, wait);
  return store;
}

std::string meeting_place() {
  if (const auto where = env("TESSERA_STORE")) return "in TESSERA_STORE=" + *where;
  const auto point = meeting_point();
  return fmt::format("at {}:{}, where {} listens (MASTER_ADDR, MASTER_PORT)", point.host, point.port,
                     torchrun_serves() ? "torchrun" : "rank 0");
}

int next_round(const StorePtr& store, int rank) {
  struct Seen {
    c10::weak_intrusive_ptr<c10d::Store> store;  // keeps the address from being used again
    int rounds = 0;
  };
  static std::mutex mutex;
  static auto& seen = *new std::map<std::pair<c10d::Store*, int>, Seen>;  // never destroyed: libtorch's objects may be destroyed first
  std::lock_guard lock(mutex);
  return seen.try_emplace({store.get(), rank}, Seen{.store = c10::weak_intrusive_ptr<c10d::Store>(store)}).first->second.rounds++;
}

std::string host_id() {
  if (const auto given = env("TESSERA_HOST_ID")) return *given;
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return fmt::format("{}/{}", host_name(), boot);
}

std::vector<std::string> exchange(const StorePtr& store, const Identity& identity, const std::string& topic, const std::string& own,
                                  const StartWait& wait) {
  auto values = bounded(time_until(wait.end) + kGrace, [=] { return exchange_now(*store, identity, topic, own, wait); });
  if (!values) {
    const auto* const keeper = env("TESSERA_STORE") ? "TESSERA_STORE names it: does its file system answer?"
                               : identity.rank == 0 ? "this process keeps it: does it get any time to run?"
                                                    : "rank 0 keeps it: is its host up and reachable?";
    throw TimeoutError("start of rank {}: the store does not answer; {}", identity.rank, keeper);
  }
  return std::move(*values);
}

std::string address_towards(const std::string& host, Clock::time_point end) {
  constexpr int kAnyPort = 1;
  // connect() on a datagram socket sends nothing, but selects the route.
  const auto found = addresses_of(host, kAnyPort, SOCK_DGRAM, end).first;
  for (const auto* entry = found.get(); entry != nullptr; entry = entry->ai_next) {
    const Fd socket(::socket(entry->ai_family, entry->ai_socktype | SOCK_CLOEXEC, entry->ai_protocol));
    if (!socket || ::connect(socket.get(), entry->ai_addr, entry->ai_addrlen) != 0) continue;
    if (auto own = address_at(socket.get(), &::getsockname); !own.empty()) return own;
  }
  return {};
}

}  // namespace tessera
