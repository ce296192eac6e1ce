// AsyncSaver: saves checkpoints while training goes on.
#pragma once

#include <filesystem>
#include <memory>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// One save at a time is under way. Its values are those of the moment at which it began: save() copies them into buffers that are kept for
/// the next one, so a process takes the memory of its part of a checkpoint once more. A device copies them when it gets there, and the host
/// goes on.
///
/// All calls are collective, also the destructor, unless it runs because of an exception. The destructor waits for the save that is under
/// way, as wait() does, and logs its error.
class AsyncSaver {
 public:
  explicit AsyncSaver(Communicator world);
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;
  ~AsyncSaver();

  /// Waits for the last save, copies the contents and returns; a thread writes them to disk. Throws what poll() throws.
  void save(const std::filesystem::path& folder, const Contents& contents, const SaveOptions& options = {});
  /// Returns true if no save is under way (any more). If a rank could not write, it throws on all ranks, and nothing of that checkpoint is
  /// left. Call it after each step: while a save is under way the ranks compare a number, otherwise nothing.
  bool poll();
  /// Returns when no save is under way. Throws what poll() throws, and IoError if a rank has written nothing for as long as an operation of
  /// the world may take (InitOptions::operation_limit): its thread is left alone then.
  void wait();

 private:
  struct Buffers;
  class UnderWay;
  enum class State;
  /// Ends what is under way if no rank is still at it.
  bool has_ended(State own);

  const Communicator world_;
  const int exceptions_;
  const std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<UnderWay> under_way_;
};

}  // namespace tessera::checkpoint
