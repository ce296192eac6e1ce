#include "tessera/comm/mpi/mpi_meeting.h"

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <climits>
#include <cstring>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/process.h"
#include "tessera/base/secret.h"
#include "tessera/comm/host/store_client.h"
#include "tessera/comm/host/store_server.h"
#include "tessera/comm/mpi/mpi_library.h"

namespace tessera {
namespace {

constexpr auto kBetweenTests = std::chrono::milliseconds(1);

/// Sent by each rank to all others.
struct MpiIntroduction {
  size_t host;  // a hash
  bool multiple;
};

/// Sent by rank 0 to all others.
struct MpiAddress {
  std::array<char, HOST_NAME_MAX + 1> host{};
  std::array<char, 33> secret{};
  int port = 0;
};

/// Waits for the end of a call that uses this memory.
template <class Memory>
void wait_for_mpi(MpiCalls& calls, MpiPending pending, std::unique_ptr<Memory>& memory, Clock::time_point end) {
  while (pending && !calls.test(*pending)) {
    if (Clock::now() >= end) {
      static_cast<void>(memory.release());  // MPI may still write there
      throw TimeoutError("time is up: not all ranks of the communicator have called tessera::init");
    }
    std::this_thread::sleep_for(kBetweenTests);
  }
}

template <size_t size>
void copy_into(std::array<char, size>& target, const std::string& text, std::string_view what) {
  if (text.size() >= size) throw ConfigError("{} has {} characters, and may have {}", what, text.size(), size - 1);
  std::ranges::copy(text, target.begin());
}

thread_local std::optional<MpiHandle> given_communicator;

/// A secret that the user has given does not travel.
std::string secret_of(const MpiAddress& address) {
  return given_secret().value_or(address.secret.data());
}

/// Serves a store until the process ends, and returns where.
MpiAddress serve_for_mpi(bool one_host, Clock::time_point end) {
  MpiAddress address;
  copy_into(address.secret, random_secret(), "the secret");
  copy_into(address.host, one_host ? "127.0.0.1" : env("MASTER_ADDR").value_or(host_name()), "MASTER_ADDR");
  auto listener = listen_at(address.host.data(), 0, one_host, end);
  sockaddr_storage own{};
  socklen_t length = sizeof own;
  ::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&own), &length);
  // The port is at the same place for both kinds of addresses.
  address.port = ntohs(reinterpret_cast<const sockaddr_in&>(own).sin_port);
  static auto& servers = *new std::vector<std::unique_ptr<StoreServer>>;
  servers.push_back(std::make_unique<StoreServer>(std::move(listener), secret_of(address)));
  return address;
}

}  // namespace

MpiMeeting::MpiMeeting(std::string_view library, MpiHandle communicator, const std::string& host_name, std::string transport,
                       std::chrono::milliseconds limit)
    : transport_(std::move(transport)) {
  auto& calls = mpi_calls();
  if (!calls.version().starts_with(library)) {
    throw ConfigError("the program is compiled for {}, but runs with {}", library, calls.version());
  }
  if (!calls.is_started() || calls.is_finished())
    throw UsageError("tessera::init(MPI_Comm) needs MPI: call it between MPI_Init and MPI_Finalize");
  const auto end = Clock::now() + limit;
  identity_ = {.rank = calls.rank(communicator), .world_size = calls.size(communicator)};
  const auto ranks = static_cast<size_t>(identity_.world_size);

  auto all = std::make_unique<std::vector<MpiIntroduction>>(ranks);
  auto& own = all->at(static_cast<size_t>(identity_.rank));
  own = {.host = std::hash<std::string>()(host_name), .multiple = calls.any_thread_may_call()};
  auto* const whole = reinterpret_cast<std::byte*>(all->data());
  wait_for_mpi(calls, calls.all_gather(std::as_bytes(std::span(&own, 1)), whole, communicator), all, end);
  const bool one_host = std::ranges::all_of(*all, [&](const auto& each) { return each.host == own.host; });
  const bool multiple = std::ranges::all_of(*all, &MpiIntroduction::multiple);

  if (transport_.empty()) transport_ = env("TESSERA_TRANSPORT").value_or("");
  if (transport_ == "mpi" && !multiple) {
    throw ConfigError(
        "transport mpi needs a program that starts MPI by MPI_Init_thread with MPI_THREAD_MULTIPLE; transport auto needs less");
  }
  if (transport_.empty()) {
    transport_ = multiple && !one_host ? "mpi" : "auto";
    if (identity_.rank == 0) {
      log(LogLevel::Info, "the ranks meet over {}, and their data goes {}", calls.version(),
          one_host   ? "through memory that they share"
          : multiple ? "over MPI"
                     : "over gloo, because the program has started MPI without MPI_THREAD_MULTIPLE");
    }
  }

  if (ranks == 1) {
    store_ = c10::make_intrusive<c10d::HashStore>();
    host_ = "127.0.0.1";
  } else {
    auto address = std::make_unique<MpiAddress>();
    std::exception_ptr trouble;
    if (identity_.rank == 0) {
      try {
        *address = serve_for_mpi(one_host, end);
      } catch (const Error&) {
        trouble = std::current_exception();
      }
    }
    wait_for_mpi(calls, calls.broadcast(std::as_writable_bytes(std::span(address.get(), 1)), 0, communicator), address, end);
    if (trouble) std::rethrow_exception(trouble);
    if (address->port == 0) throw CommError("rank 0 can't serve the store in which the ranks meet; its error says why");
    host_ = address->host.data();
    try {
      store_ = c10::make_intrusive<StoreClient>(host_, address->port, secret_of(*address), end);
    } catch (const TimeoutError& error) {
      throw TimeoutError("rank {} found no store at {}:{}: {}; set MASTER_ADDR to an address of rank 0's host that all hosts reach",
                         identity_.rank, host_, address->port, error.what());
    }
  }
  given_communicator = communicator;
}

MpiMeeting::~MpiMeeting() {
  given_communicator.reset();
}

const std::optional<MpiHandle>& given_mpi() {
  return given_communicator;
}

}  // namespace tessera
