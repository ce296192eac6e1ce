#include "tessera/comm/mpi/mpi_turn.h"

#include <thread>

#include "tessera/base/error.h"

namespace tessera {
namespace {

constexpr auto kTurnsTaken = "turns/taken", kTurnsEnded = "turns/ended";
constexpr auto kBetweenTurns = std::chrono::milliseconds(1);

}  // namespace

std::shared_ptr<MpiComm> MpiTurns::make_comm(const MpiComm& whole, Link& part) const {
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

void MpiTurns::wait_for_turn(Clock::time_point end) const {
  const auto turn = store_->add(kTurnsTaken, 1);
  while (store_->add(kTurnsEnded, 0) != turn - 1) {
    if (Clock::now() >= end) throw TimeoutError("another communicator of MPI is still being made");
    std::this_thread::sleep_for(kBetweenTurns);
  }
}

}  // namespace tessera
