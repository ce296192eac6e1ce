#include "tessera/comm/threads/run_ranks.h"

#include <fmt/format.h>

#include <exception>
#include <mutex>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/comm/host_transport.h"
#include "tessera/comm/shm/board_link.h"

namespace tessera {
namespace {

/// The exception being handled, with its rank before the message; those of other libraries become an Error.
std::exception_ptr with_rank(int rank) {
  try {
    throw;
  } catch (Error& error) {
    error.add_context(fmt::format("rank {}: ", rank));
    return std::current_exception();
  } catch (const std::exception& error) {
    return std::make_exception_ptr(Error(fmt::format("rank {}: {}", rank, error.what())));
  } catch (...) {
    return std::make_exception_ptr(Error(fmt::format("rank {}: an exception that is no std::exception", rank)));
  }
}

std::string message_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  }
}

}  // namespace

void run_ranks(int size, const std::function<void(Communicator world)>& program, const ThreadOptions& options) {
  if (size < 1) throw UsageError(fmt::format("a world of {} ranks is none; give at least one", size));
  const auto block = SharedBlock::make(SharedBlock::Source::Heap, BoardLink::block_size(size));
  std::mutex mutex;
  std::exception_ptr first;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; rank++) {
    threads.emplace_back([&, rank] {
      const Communicator world(host_transport("threads", std::make_unique<BoardLink>(block, rank, size)), options.limit);
      try {
        program(world);
      } catch (...) {
        const auto error = with_rank(rank);
        {
          std::lock_guard lock(mutex);
          if (!first) first = error;
        }
        world.abort(message_of(error));
      }
    });
  }
  for (auto& thread : threads) thread.join();
  if (first) std::rethrow_exception(first);
}

}  // namespace tessera
