#include "tessera/comm/mpi/mpi.h"

#include <fmt/format.h>

#include <chrono>
#include <memory>
#include <thread>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/comm/backend/backend_link.h"
#include "tessera/comm/c10d/collectives.h"
#include "tessera/comm/mpi/mpi_backend.h"
#include "tessera/comm/mpi/mpi_library.h"
#include "tessera/comm/mpi/mpi_meeting.h"

namespace tessera {
namespace {

constexpr std::string_view kUnfit = "can't use MPI: ";
constexpr auto kTurnsTaken = "turns/taken", kTurnsEnded = "turns/ended";
constexpr auto kBetweenTurns = std::chrono::milliseconds(1);

/// How this rank can use MPI, in a line that is the same on all ranks if all of them can.
std::string own_mpi(const Identity& identity) {
  if (const auto why_not = why_no_mpi(); !why_not.empty()) return fmt::format("{}{}", kUnfit, why_not);
  for (const auto* size : {"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"}) {
    const auto ranks = given_mpi() ? std::nullopt : env(size);
    if (ranks && *ranks != std::to_string(identity.world_size)) {
      return fmt::format("{}MPI has started {} of the {} ranks ({}); start all of them with mpirun -n {}", kUnfit, *ranks,
                         identity.world_size, size, identity.world_size);
    }
  }
  return mpi_calls().version();
}

/// All ranks must come to MPI_Init_thread, or none may, because it waits for all of them.
void expect_one_mpi(const Meeting& meeting) {
  const auto found = exchange(meeting.store, meeting.identity, "mpi", own_mpi(meeting.identity), {.end = meeting.end});
  for (size_t rank = 0; rank < found.size(); rank++) {
    if (found[rank].starts_with(kUnfit)) throw ConfigError("rank {} {}", rank, found[rank]);
    if (found[rank] != found.front()) {
      throw ConfigError("rank 0 has {}, but rank {} has {}; start all ranks with one mpirun", found.front(), rank, found[rank]);
    }
  }
}

/// Makes the communicator of all ranks.
std::shared_ptr<MpiComm> whole_comm(const Meeting& meeting) {
  auto& thread = MpiThread::instance();
  thread.start_mpi(meeting.end);
  const auto [rank, size] = meeting.identity;
  struct Made {
    MpiHandle handle;
    int rank, size;
  };
  const auto made = thread.run("MPI_Comm_dup", meeting.end, [given = given_mpi()](MpiCalls& calls) {
    const auto handle = calls.duplicate(given.value_or(calls.world()));
    return Made{.handle = handle, .rank = calls.rank(handle), .size = calls.size(handle)};
  });
  auto communicator = std::make_shared<MpiComm>(made.handle);
  if (made.rank != rank || made.size != size) {
    throw ConfigError("this is rank {} of {}, but rank {} of {} for MPI; start the ranks with mpirun -n {}", rank, size, made.rank,
                      made.size, size);
  }
  return communicator;
}

/// MPI makes a communicator in a call that waits for all of its ranks. If two threads make two of them, one rank may begin with the first
/// and another rank with the second, and both would wait for ever. So the store counts turns, and each communicator has one of its own.
class MpiTurns {
 public:
  MpiTurns(const StorePtr& store, std::chrono::milliseconds limit) : store_(store->clone()), limit_(limit) {}

  /// Collective over the ranks of `part`: their communicator.
  std::shared_ptr<MpiComm> make_comm(const MpiComm& whole, Link& part) const {
    const auto end = Clock::now() + limit_;
    const bool leads = part.rank() == 0, is_shared = part.size() > 1;
    const auto all_are_here = [&] { all_gather_values(part, 0, end); };
    if (is_shared) {
      if (leads) wait_for_turn(end);
      all_are_here();
    }
    const std::vector<int> ranks(part.world_ranks().begin(), part.world_ranks().end());
    const auto handle = MpiThread::instance().run("MPI_Comm_create_group", end,
                                                  [on = whole.handle(), ranks](MpiCalls& calls) { return calls.part(on, ranks); });
    auto made = std::make_shared<MpiComm>(handle);
    if (is_shared) {
      all_are_here();  // a rank that still waits in its call needs the others there
      if (leads) store_->add(kTurnsEnded, 1);
    }
    return made;
  }

 private:
  void wait_for_turn(Clock::time_point end) const {
    const auto turn = store_->add(kTurnsTaken, 1);
    while (store_->add(kTurnsEnded, 0) != turn - 1) {
      if (Clock::now() >= end) throw TimeoutError("another communicator of MPI is still being made");
      std::this_thread::sleep_for(kBetweenTurns);
    }
  }

  const StorePtr store_;
  const std::chrono::milliseconds limit_;
};

}  // namespace

Connection connect_mpi(const Meeting& meeting) {
  expect_one_mpi(meeting);
  const auto [rank, size] = meeting.identity;
  const auto whole = whole_comm(meeting);
  const StorePtr store = c10::make_intrusive<c10d::PrefixStore>("mpi", meeting.store);
  const auto messages = c10::make_intrusive<MpiBackend>(whole, rank, size, std::make_shared<MpiPresence>(store, rank));
  const std::shared_ptr<Link> link = watched_backend_link(messages, store);
  const auto turns = std::make_shared<MpiTurns>(store, meeting.start_limit);
  const auto part_of = [whole, turns](const std::string& /*name*/, Link& part) -> BackendPtr {
    return c10::make_intrusive<MpiBackend>(turns->make_comm(*whole, part), part.rank(), part.size());
  };
  GroupTraits traits{.name = "mpi", .topology = meeting.topology, .sums = SumOrder::Any};
  auto collectives = c10::make_intrusive<MpiBackend>(whole, rank, size);
  return {.link = link, .transport = std::make_unique<CollectivesTransport>(std::move(traits), link, std::move(collectives), part_of)};
}

}  // namespace tessera
