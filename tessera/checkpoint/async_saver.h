// Saves checkpoints in a background thread while training continues.
#pragma once

#include <filesystem>
#include <memory>

#include "tessera/checkpoint/checkpoint.h"

namespace tessera::checkpoint {

/// Runs one save at a time. A checkpoint has the values that the contents have when save() is called: save() copies them into host buffers.
/// Later saves reuse the buffers, so each process needs host memory for one copy of its part of a checkpoint. Copies from a device run in
/// stream order, and the host does not wait for them.
///
/// All calls are collective, and so is the destructor unless it runs because of an exception. The destructor waits for the running save, as
/// wait() does, and logs its error; because of an exception, it does not wait for other ranks.
class AsyncSaver {
 public:
  explicit AsyncSaver(Communicator world);
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;
  ~AsyncSaver();

  /// Waits for the last save, copies the contents and returns; a thread writes them to disk. Throws what poll() throws.
  void save(const std::filesystem::path& folder, const Contents& contents, const SaveOptions& options = {});
  /// Returns true if no save is running. If a rank could not write, throws on all ranks and leaves nothing of that checkpoint. Call it
  /// after each step: while a save is running, the ranks compare one number; otherwise they communicate nothing.
  bool poll();
  /// Returns when no save is running. Throws what poll() throws, and IoError if a rank has written nothing for as long as an operation of
  /// the world may take (InitOptions::operation_limit). The stuck thread is then detached.
  void wait();

 private:
  struct Buffers;
  class UnderWay;
  enum class State;
  /// Returns whether the running save has ended on all ranks, and finishes the save if so.
  bool has_ended(State own);

  const Communicator world_;
  const int exceptions_;
  const std::unique_ptr<Buffers> buffers_;
  std::unique_ptr<UnderWay> under_way_;
};

}  // namespace tessera::checkpoint
