// Memory that several ranks see: threads of one process, or processes of one host. Nothing of it outlives the last of them.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "tessera/base/fd.h"

namespace tessera {

class SharedBlock {
 public:
  enum class Source : int32_t { Heap, Memfd };

  /// What another rank needs to open the block: plain bytes, to be passed over whatever the ranks already have in common.
  struct Ticket {
    Source source = Source::Heap;
    int32_t fd = -1;
    int64_t pid = 0;
    uint64_t size = 0;
    uint64_t nonce = 0;                                // lies behind the data, too: proves that the right memory was opened
    const std::shared_ptr<std::byte>* data = nullptr;  // Heap only
  };

  /// Zeroed memory: on the heap for ranks that are threads, or anonymous (no file system is involved) for other processes to map.
  enum class Commit { Now, Later };
  static SharedBlock make(Source source, size_t size, Commit commit = Commit::Now);
  /// While the block that gave the ticket still exists. Throws IoError with the reason where processes can't share memory, for example
  /// because they run in separate containers.
  static SharedBlock open(const Ticket& ticket);

  /// Makes sure that the memory of a stretch is there: what is not is an error here, not a bus error later. Throws IoError.
  void commit(size_t begin, size_t size) const;

  /// All who shall have opened it: it needs no file descriptor any more.
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

  // Behind a pointer of its own, so that a ticket stays good when the block moves.
  std::shared_ptr<const std::shared_ptr<std::byte>> keeper_;
  std::shared_ptr<std::byte> data_;
  std::shared_ptr<Fd> fd_;
  Ticket ticket_;
};

}  // namespace tessera
