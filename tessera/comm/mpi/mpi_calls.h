// MpiCalls: the calls of MPI that the engine makes. A program for one MPI library can't call another one, so a module for each library
// implements them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>

namespace tessera {

using MpiHandle = std::uintptr_t;             // an MPI_Comm or an MPI_Request
using MpiPending = std::optional<MpiHandle>;  // nothing: the call has ended

enum class MpiType { Int8, UInt8, Int16, Int32, Int64, Float, Double, Half, BFloat16 };
enum class MpiOp { Sum, Min, Max };

/// A call that fails throws std::runtime_error with MPI's text. Calls that return an MpiPending do not wait, and their memory stays in use
/// until test() says that they have ended.
class MpiCalls {
 public:
  static constexpr size_t kMostValues = 0x7fffffff;  // of reductions; messages may be longer

  virtual ~MpiCalls() = default;

  virtual std::string version() = 0;  // may be called before start()
  virtual bool is_started() = 0;
  virtual bool is_finished() = 0;
  virtual bool any_thread_may_call() = 0;  // whether the level is MPI_THREAD_MULTIPLE
  virtual bool one_thread_may_call() = 0;  // whether a thread other than the main one may be the only one that calls
  virtual void start() = 0;
  virtual void finish() = 0;
  /// Calls `then` at the beginning of MPI_Finalize, whoever calls that.
  virtual void before_finish(std::function<void()> then) = 0;

  virtual MpiHandle world() = 0;
  virtual int rank(MpiHandle communicator) = 0;
  virtual int size(MpiHandle communicator) = 0;
  /// These two wait for all ranks of the new communicator. Its errors are returned, and do not end the process.
  virtual MpiHandle duplicate(MpiHandle communicator) = 0;
  virtual MpiHandle part(MpiHandle communicator, std::span<const int> ranks) = 0;
  virtual void release(MpiHandle communicator) = 0;

  virtual MpiPending send(std::span<const std::byte> bytes, int rank, int tag, MpiHandle communicator) = 0;
  virtual MpiPending receive(std::span<std::byte> bytes, int rank, int tag, MpiHandle communicator) = 0;
  /// `own` may be this rank's place in `whole`.
  virtual MpiPending all_gather(std::span<const std::byte> own, std::byte* whole, MpiHandle communicator) = 0;
  virtual MpiPending broadcast(std::span<std::byte> bytes, int root, MpiHandle communicator) = 0;
  virtual MpiPending all_reduce(void* values, size_t count, MpiType type, MpiOp op, MpiHandle communicator) = 0;
  virtual MpiPending reduce_scatter(const void* whole, void* own, size_t own_count, MpiType type, MpiOp op, MpiHandle communicator) = 0;

  virtual bool test(MpiHandle& request) = 0;
  /// Moves messages that have left no call behind, such as a small one that was sent while the network was busy.
  virtual void progress() = 0;
};

/// The one function that a module exports.
inline constexpr auto kMpiFactory = "tessera_mpi_calls";
using MpiFactory = MpiCalls* (*)();

}  // namespace tessera
