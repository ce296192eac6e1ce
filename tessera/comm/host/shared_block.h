// Memory that several ranks see: threads of one process, or processes of one host. The memory is freed when no rank uses it any more.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "tessera/base/fd.h"

namespace tessera {

class SharedBlock {
 public:
  enum class Source : int32_t { Heap, Memfd };

  /// All that another rank needs to open the block: plain bytes, which the ranks can send through any channel that they have.
  struct Ticket {
    Source source = Source::Heap;
    int32_t fd = -1;
    int64_t pid = 0;
    uint64_t size = 0;
    uint64_t nonce = 0;                                // also stored after the data, to verify that the right memory was opened
    const std::shared_ptr<std::byte>* data = nullptr;  // Heap only
  };

  /// Zeroed memory: on the heap for ranks that are threads, or a memfd that other processes can map. Throws IoError.
  enum class Commit { Now, Later };
  static SharedBlock make(Source source, size_t size, Commit commit = Commit::Now);
  /// Valid only while the block that gave the ticket exists and is not sealed. Throws IoError with the reason if the processes can't share
  /// memory, for example because they run in separate containers.
  static SharedBlock open(const Ticket& ticket);

  /// Allocates the memory of a range. Throws IoError if there is not enough, which would otherwise be a bus error at the first access.
  void commit(size_t begin, size_t size) const;

  /// Drops the file descriptor. Call it when all ranks have opened the block.
  void seal() { fd_.reset(); }

  const std::shared_ptr<std::byte>& memory() const { return data_; }
  std::byte* data() const { return data_.get(); }
  size_t size() const { return ticket_.size; }
  const Ticket& ticket() const { return ticket_; }

 private:
  SharedBlock() = default;
  static SharedBlock on_heap(size_t size);
  static SharedBlock on_memfd(size_t size, Commit commit);
  static std::shared_ptr<std::byte> map(int fd, size_t size);

  // A pointer to the pointer, so that a ticket stays valid when the block is moved.
  std::shared_ptr<const std::shared_ptr<std::byte>> keeper_;
  std::shared_ptr<std::byte> data_;
  std::shared_ptr<Fd> fd_;
  Ticket ticket_;
};

}  // namespace tessera
