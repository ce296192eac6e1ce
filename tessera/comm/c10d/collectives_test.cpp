// Collectives of c10d backends: on a device whose streams lag, where a missing wait shows as a wrong number, and those of gloo.
#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <algorithm>
#include <stdexcept>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/process.h"
#include "tessera/comm/c10d/connect.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/host/shared_block.h"
#include "tessera/comm/shm/shared_memory_link.h"
#include "tests/testing/careless.h"
#include "tests/testing/child_task.h"
#include "tests/testing/delayed_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::collectives_test {
namespace {

using std::chrono::milliseconds;

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::SizeIs;

constexpr int64_t kNumel = 64;
constexpr int kRanks = kDelayedRanks;

at::Tensor on_device(int64_t numel) {
  auto tensor = at::empty({numel}, at::TensorOptions().dtype(at::kFloat).device(delayed_device()));
  std::fill_n(tensor.data_ptr<float>(), numel, 0.0F);  // at once, on the host
  return tensor;
}

void queue_fill(const at::Tensor& tensor, float value) {
  enqueue([memory = tensor.data_ptr<float>(), count = tensor.numel(), value] { std::fill_n(memory, count, value); });
}

void queue_read(const at::Tensor& tensor, std::vector<float>& seen) {
  enqueue([memory = tensor.data_ptr<float>(), count = tensor.numel(), &seen] { seen.assign(memory, memory + count); });
}

/// Gathers an input that the compute stream has just written, and returns the values that this stream reads of the result.
std::vector<float> gathered(Forgets forgets) {
  const auto world = world_on_delayed_device(forgets);
  const auto whole = on_device(kRanks * kNumel);
  auto own = on_device(kNumel);
  std::vector<float> seen;
  queue_fill(own, 3);
  const Piece piece{.whole = whole, .own = own};
  world.all_gather(std::span(&piece, 1)).wait();
  EXPECT_EQ(own.data_ptr<float>()[0], 0) << "the host has waited for the device";
  queue_read(whole, seen);
  run_all(forgets == Forgets::Inputs ? Current::Last : Current::First);
  return seen;
}

TEST(CollectivesOnADevice, RunBehindTheirInputsAndBeforeWhatReadsThem) {
  EXPECT_THAT(gathered(Forgets::Nothing), AllOf(SizeIs(kRanks * kNumel), Each(3)));
  EXPECT_THAT(gathered(Forgets::Inputs), Each(0)) << "the gather reads its input before it is written";
  EXPECT_THAT(gathered(Forgets::Results), Each(0)) << "the result is read before it is written";
}

/// Sums gradients whose memory is freed and written again as soon as the reduction is started.
std::vector<float> reduced(Forgets forgets) {
  const auto world = world_on_delayed_device(forgets);
  const auto own = on_device(kNumel);
  const void* memory = nullptr;
  {
    const auto gradients = on_device(kRanks * kNumel);
    memory = gradients.data_ptr();
    queue_fill(gradients, 5);
    (void)world.reduce_scatter(std::array{Piece{.whole = gradients, .own = own}});
    world.barrier();  // by now the reduction is queued on the device
  }
  const auto next = on_device(kRanks * kNumel);
  EXPECT_EQ(next.data_ptr() == memory, forgets == Forgets::Memory);
  queue_fill(next, 70);
  run_all();
  return {own.data_ptr<float>(), own.data_ptr<float>() + kNumel};
}

TEST(CollectivesOnADevice, KeepTheMemoryThatTheyRead) {
  EXPECT_THAT(reduced(Forgets::Nothing), Each(10));
  EXPECT_THAT(reduced(Forgets::Memory), Each(140)) << "the reduction has read values that were written after it started";
}

TEST(CollectivesOnADevice, HaveATimeLimitThere) {
  const auto world = world_on_delayed_device(Forgets::Nothing).with_limit(milliseconds(300));
  const auto whole = on_device(kRanks * kNumel), own = on_device(kNumel);
  const Piece piece{.whole = whole, .own = own};
  world.all_gather(std::span(&piece, 1), {.unit = "layers.3"}).wait();  // the gather is queued, and nothing lets it run
  const auto error = [&] {
    for (const auto end = Clock::now() + kTestLimit; Clock::now() < end; std::this_thread::sleep_for(milliseconds(50))) {
      try {
        world.barrier();
      } catch (const TimeoutError& found) {
        return std::string(found.what());
      }
    }
    return std::string("no error");
  }();
  EXPECT_THAT(error, AllOf(HasSubstr("all_gather of 'layers.3'"), HasSubstr("waited 0.3 s for rank")));
  run_all();
}

/// The error of a rank of three whose last rank does something else in the middle of an operation.
std::string error_of_a_rank(const StorePtr& store, int rank, std::vector<int> hosts, milliseconds limit,
                            const std::function<void()>& last) {
  const Meeting meeting{.store = store,
                        .identity = {.rank = rank, .world_size = 3},
                        .topology = Topology(std::move(hosts)),
                        .start_limit = kTestLimit,
                        .end = Clock::now() + kTestLimit};
  auto connection = connect_gloo_collectives(meeting);
  if (rank == 2) connection.transport = std::make_unique<Careless>(std::move(connection.transport), Forgets::Nothing, last);
  const auto world = world_over(std::move(connection), {});
  world.barrier();
  try {
    world.with_limit(limit).all_reduce(at::ones({1000}), {}, {.unit = "layers.3"}).wait();
  } catch (const CommError& error) {
    return error.what();
  }
  return "no error";
}

const std::array kHosts = {std::vector{0, 0, 0}, std::vector{0, 1, 2}};  // the ranks agree over shared memory, or by messages

const ChildTask dies("die in a collective", [](const std::string& rank) {
  const auto store = c10::make_intrusive<c10d::FileStore>(env("TEST_STORE").value(), 3);
  const auto& hosts = kHosts.at(env("TEST_HOSTS").value() == "3" ? 1 : 0);
  std::puts(error_of_a_rank(store, std::stoi(rank), hosts, kTestLimit, [] { ::raise(SIGKILL); }).c_str());
  return 0;
});

TEST(CollectivesOfABackend, NameARankThatIsKilledInTheirMiddle) {
  for (const auto* hosts : {"1", "3"}) {
    const Folder folder;
    std::vector<Process> processes;
    for (const auto* rank : {"0", "1", "2"}) {
      const auto environment = dies.environment(rank, {{"TEST_STORE", folder / "store"}, {"TEST_HOSTS", hosts}});
      processes.emplace_back(std::vector<std::string>{this_program()}, environment, Process::Output::Capture);
    }
    for (size_t rank = 0; rank < 2; rank++) {
      EXPECT_THAT(processes[rank].read_output(),
                  AllOf(HasSubstr("all_reduce of 'layers.3'"), HasSubstr("rank 2 "), ::testing::Not(HasSubstr("failed"))))
          << hosts << " hosts";
    }
    EXPECT_EQ(processes[2].wait(kTestLimit), 128 + SIGKILL);
  }
}

TEST(CollectivesOfABackend, NameARankThatStopsInTheirMiddle) {
  for (const auto& hosts : kHosts) {
    const Folder folder;
    std::atomic<int> waiting = 2;
    std::vector<std::string> errors(3);
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < 3; rank++) {
      ranks.emplace_back([&, rank] {
        const auto store = c10::make_intrusive<c10d::FileStore>(folder / "store", 3);
        errors[rank] = error_of_a_rank(store, rank, hosts, milliseconds(300), [&] {
          while (waiting > 0) std::this_thread::sleep_for(milliseconds(5));
        });
        waiting--;
      });
    }
    for (auto& rank : ranks) rank.join();
    for (int rank = 0; rank < 2; rank++)
      EXPECT_THAT(errors[rank], AllOf(HasSubstr("waited 0.3 s for rank 2 and"), HasSubstr("'layers.3'")));
    EXPECT_THAT(errors[2], HasSubstr("waited 0.3 s for rank 2"));
  }
}

/// A backend whose broadcasts fail on ranks from `first_to_fail` on, and end at once on all others.
class OneSided final : public c10d::Backend {
 public:
  int first_to_fail = 0;
  using Backend::Backend;
  const std::string getBackendName() const override { return "one-sided"; }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& /*tensors*/, const c10d::BroadcastOptions& /*options*/) override {
    struct Ended final : c10d::Work {
      bool wait(milliseconds /*limit*/) override { return true; }
    };
    if (rank_ >= first_to_fail) throw std::runtime_error("no buffer left");
    return c10::make_intrusive<Ended>();
  }
};

/// The error of each rank in a broadcast over a backend that fails on some ranks.
std::vector<std::string> errors_of_broadcast(int first_to_fail) {
  constexpr int kSize = 3;
  const auto block = SharedBlock::make(SharedBlock::Source::Heap, SharedMemoryLink::block_size(kSize));
  std::vector<std::string> errors(kSize);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < kSize; rank++) {
    auto link = std::make_shared<SharedMemoryLink>(block, rank, all_ranks(kSize));
    auto backend = c10::make_intrusive<OneSided>(rank, kSize);
    backend->first_to_fail = first_to_fail;
    auto transport = std::make_unique<CollectivesTransport>(GroupTraits{.name = "one-sided"}, link, std::move(backend), nullptr);
    ranks.emplace_back([&errors, rank, world = world_over({.link = std::move(link), .transport = std::move(transport)}, {})] {
      errors[rank] = message_of<CommError>([&] {
        world.broadcast(at::ones({4}), 0).wait();
        world.extremes(7, {});
      });
    });
  }
  for (auto& rank : ranks) rank.join();
  return errors;
}

TEST(CollectivesOfABackend, BlameNoRankForWhatFailsOnAll) {
  EXPECT_THAT(errors_of_broadcast(0), Each(HasSubstr("failed: no buffer left (on every rank, so no single rank is to blame)")));
}

TEST(CollectivesOfABackend, TellOthersOfAFailureThatTheyDoNotHave) {
  const auto errors = errors_of_broadcast(2);
  EXPECT_THAT(errors, Each(::testing::Not(HasSubstr("on every rank"))));
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("of rank 2, broadcast: 4 x Float"), HasSubstr("failed: no buffer left"))));
  for (int rank = 0; rank < 2; rank++) EXPECT_THAT(errors[rank], HasSubstr("compare, was broken off"));
}

}  // namespace
}  // namespace tessera::testing::collectives_test
