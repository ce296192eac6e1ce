// A rank of the tests of the engine mpi. They run this program by mpirun, compiled for each MPI: ranks CASE
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <mpi.h>
#include <tessera/mpi.h>
#include <tessera/tessera.h>

#include <array>
#include <cstdio>
#include <functional>
#include <map>
#include <optional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/conformance.h"

namespace tessera::testing::mpi_ranks {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

void expect(bool holds, std::string_view what) {
  if (!holds) throw Error("{} does not hold", what);
}

template <class Act>
std::string error_of(Act act) {
  try {
    act();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

void start_mpi(int level) {
  int given = 0;
  MPI_Init_thread(nullptr, nullptr, level, &given);
  expect(given == level, "the level of threads");
}

void run_checks(const Communicator& world) {
  for (const auto& check : conformance_checks(world)) check.run(world);
}

/// The program's ranks are in another order than those of MPI_COMM_WORLD, and it uses MPI at the same time.
void multiple() {
  start_mpi(MPI_THREAD_MULTIPLE);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  MPI_Comm reversed = MPI_COMM_NULL;
  MPI_Comm_split(MPI_COMM_WORLD, 0, -rank, &reversed);
  auto world = tessera::init(reversed, {.transport = "mpi"});
  MPI_Comm_free(&reversed);
  expect(world.rank() == size - 1 - rank && world.size() == size && world.traits().name == "mpi", "the rank of the communicator");
  std::thread other([&] {
    for (int i = 0; i < 200; i++) {
      int sum = 0;
      MPI_Allreduce(&i, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
      expect(sum == i * size, "the program's own sum");
    }
  });
  run_checks(world);
  other.join();
  ::setenv("TESSERA_HOST_ID", std::to_string(rank).c_str(), 1);
  expect(tessera::init(MPI_COMM_WORLD).traits().name == "mpi", "that hosts talk over MPI");
  MPI_Finalize();
  expect(error_of([&] { world.barrier(); }).find("MPI_Finalize") != std::string::npos, "the error after the end of MPI");
}

/// MPI only lets the ranks meet.
void funneled() {
  start_mpi(MPI_THREAD_FUNNELED);
  int rank = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  const auto refused = error_of([] { tessera::init(MPI_COMM_WORLD, {.transport = "mpi"}); });
  expect(refused.find("MPI_THREAD_MULTIPLE") != std::string::npos, "the error without threads");
  const auto shared = tessera::init(MPI_COMM_WORLD);
  expect(shared.traits().name == "shm", "that ranks of one host share memory");
  ::setenv("TESSERA_HOST_ID", std::to_string(rank).c_str(), 1);
  ::setenv("MASTER_ADDR", "127.0.0.1", 1);
  const auto apart = tessera::init(MPI_COMM_WORLD);
  expect(apart.traits().name == "gloo", "that hosts talk over gloo");
  run_checks(apart);
  MPI_Finalize();
}

/// Two threads make groups at the same time, and each rank begins with another thread.
void groups() {
  const auto world = tessera::init({.transport = "mpi"});
  const std::array both = {world.duplicate(), world.duplicate()};
  std::vector<std::thread> threads;
  for (int i = 0; i < 2; i++) {
    const auto& own = both.at((i + world.rank()) % 2);
    threads.emplace_back([&own] {
      for (int64_t round = 0; round < 30; round++) {
        const auto ones = at::ones({1000}, at::kBFloat16);
        own.duplicate().all_reduce(ones).wait();
        expect(at::equal(ones, at::full({1000}, own.size(), at::kBFloat16)), "the sum of a group");
      }
    });
    std::this_thread::sleep_for(milliseconds(20));
  }
  for (auto& thread : threads) thread.join();
}

/// More bytes than an int can count.
void large() {
  const auto world = tessera::init({.transport = "mpi"});
  const int64_t count = (int64_t{1} << 31) + 5;
  const auto whole = at::zeros({world.size() * count}, at::kByte);
  const auto own = whole.narrow(0, world.rank() * count, count).fill_(world.rank() + 1);
  world.all_gather(std::array{Piece{.whole = whole, .own = own}}).wait();
  for (int rank = 0; rank < world.size(); rank++) {
    expect(whole[rank * count].item<int>() == rank + 1 && whole[(rank + 1) * count - 1].item<int>() == rank + 1, "a large gather");
  }
  world.broadcast(own, 0).wait();
  expect(own[count - 1].item<int>() == 1, "a large broadcast");
}

/// Prints the error that the other ranks get when rank 1 fails in this way.
void trouble(const std::function<void(Communicator& world)>& of_rank_1, seconds limit = std::chrono::minutes(10)) {
  auto world = std::optional(tessera::init({.transport = "mpi", .operation_limit = limit}));
  const auto tensor = at::ones({300'000});
  world->all_reduce(tensor, {}, {.unit = "layers.3"}).wait();
  if (world->rank() == 1) {
    of_rank_1(*world);
    world.reset();
    std::this_thread::sleep_for(seconds(12));  // mpirun ends all ranks when one of them has ended
    return;
  }
  const auto said = error_of([&] { world->all_reduce(tensor, {}, {.unit = "layers.4"}).wait(); });
  fmt::print("rank {} says: {}\n", world->rank(), said);
  std::fflush(stdout);
  if (world->rank() == 0) std::this_thread::sleep_for(seconds(6));
}

void late() {
  trouble(
      [](Communicator& world) {
        std::this_thread::sleep_for(seconds(4));
        fmt::print("rank 1 says: {}\n", error_of([&] { world.barrier(); }));
      },
      seconds(2));
}

int run(const std::string& name) try {
  const std::map<std::string, std::function<void()>> cases = {
      {"multiple", multiple},
      {"funneled", funneled},
      {"groups", groups},
      {"large", large},
      {"leaves", [] { trouble([](Communicator&) {}); }},
      {"aborts", [] { trouble([](Communicator& world) { world.abort("enough of this"); }); }},
      {"late", late},
  };
  cases.at(name)();
  fmt::print("{} holds\n", name);
  return 0;
} catch (const std::exception& error) {
  fmt::print(stderr, "{}: {}\n", name, error.what());
  return 1;
}

}  // namespace
}  // namespace tessera::testing::mpi_ranks

int main(int argc, char** argv) {
  return argc == 2 ? tessera::testing::mpi_ranks::run(argv[1]) : 2;
}
