#include "tessera/comm/threads/run_ranks.h"

#include <ATen/ATen.h>
#include <c10/core/AutogradState.h>
#include <fmt/format.h>

#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/device/own_device.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/levels/levels_link.h"
#include "tessera/comm/shm/shared_memory_link.h"

namespace tessera {
namespace {

/// The failure that run_ranks throws: the first one that is not an echo, or else the first. An echo only reports that another rank has
/// failed.
struct FirstFailure {
  std::mutex mutex;
  std::exception_ptr error;
  bool is_echo = false;
};

/// libtorch's vector functions are those of MKL, which chooses the kernel of each in its first call. If several threads make that call at
/// once, one may compute with a kernel of low accuracy (pytorch issue 188792). Ranks that are threads would make these calls at once in
/// their first pass, so each function is called here before they start.
void choose_math_kernels() {
  static const bool chosen = [] {
    for (const auto type : {at::kFloat, at::kDouble}) {
      const auto half = at::full({1}, 0.5, type);
      for (auto* function : {&at::acos, &at::asin, &at::atan, &at::cos, &at::erf, &at::erfc, &at::erfinv, &at::exp, &at::log, &at::log10,
                             &at::log2, &at::sin, &at::sqrt, &at::tan, &at::tanh}) {
        function(half);
      }
    }
    return true;
  }();
  static_cast<void>(chosen);
}

void run_rank(const Communicator& world, const std::function<void(Communicator)>& program, FirstFailure& first) {
  const auto where = fmt::format("rank {}: ", world.rank());
  const auto end = [&](bool is_echo) {
    {
      const std::lock_guard lock(first.mutex);
      if (!first.error || (first.is_echo && !is_echo)) {
        first.error = with_context(where);
        first.is_echo = is_echo;
      }
    }
    world.abort(message_of(std::current_exception()));
  };
  try {
    program(world);
  } catch (const CommError&) {
    end(/*is_echo=*/true);
  } catch (...) {
    end(/*is_echo=*/false);
  }
}

}  // namespace

void run_ranks(int size, const std::function<void(Communicator world)>& program, const ThreadOptions& options) {
  if (size < 1) throw UsageError("a world needs at least one rank, not {}", size);
  const auto topology = options.host_of.empty() ? Topology::one_host(size) : Topology(options.host_of);
  if (topology.ranks() != size) throw UsageError("{} hosts were named for {} ranks; name one for each", topology.ranks(), size);
  const auto block_of = [](int ranks) { return SharedBlock::make(SharedBlock::Source::Heap, SharedMemoryLink::block_size(ranks)); };
  const auto block = block_of(size);
  std::vector<SharedBlock> hosts;  // the blocks of the hosts, if there are two levels
  if (topology.hosts() > 1 && topology.hosts() < size) {
    for (int host = 0; host < topology.hosts(); host++) hosts.push_back(block_of(static_cast<int>(topology.ranks_on(host).size())));
  }
  const auto device = own_device(options.device.value_or(default_device()), 0);
  std::vector<Communicator> worlds;
  for (int rank = 0; rank < size; rank++) {
    std::shared_ptr<Link> link = std::make_shared<SharedMemoryLink>(block, rank, all_ranks(size));
    if (!hosts.empty()) {
      const int host = topology.host_of(rank);
      const auto here = topology.ranks_on(host);
      auto inner = std::make_shared<SharedMemoryLink>(hosts[static_cast<size_t>(host)], topology.place_of(rank),
                                                      std::vector(here.begin(), here.end()));
      link = std::make_shared<LevelsLink>(std::move(inner), std::move(link), topology);
    }
    worlds.push_back(
        world_over({.link = std::move(link)}, {.name = "threads", .topology = topology, .device = device}).with_limit(options.limit));
  }
  choose_math_kernels();
  FirstFailure first;
  {
    std::vector<std::jthread> threads;
    // Each thread owns its world, so that the other ranks notice when it ends.
    for (auto& world : worlds)
      threads.emplace_back([&, world = std::move(world)]() mutable {
        const Communicator own = std::move(world);
        make_current(device);
        c10::AutogradState::get_tls_state().set_multithreading_enabled(device.is_cpu());
        run_rank(own, program, first);
      });
  }
  if (first.error) std::rethrow_exception(first.error);
}

}  // namespace tessera
