#include "tessera/comm/host/shared_block.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <random>

#include "tessera/base/error.h"

namespace tessera {
namespace {

uint64_t fresh_nonce() {
  std::random_device source;
  return (static_cast<uint64_t>(source()) << 32 | source()) | 1;  // never zero, because fresh memory is zero
}

}  // namespace

SharedBlock SharedBlock::make(Source source, size_t size, Commit commit) {
  return source == Source::Heap ? on_heap(size) : on_memfd(size, commit);
}

SharedBlock SharedBlock::on_heap(size_t size) {
  SharedBlock block;
  constexpr size_t kLine = 64;
  auto* memory = static_cast<std::byte*>(::operator new(size, std::align_val_t(kLine)));
  std::memset(memory, 0, size);
  block.data_ = {memory, [](std::byte* pointer) { ::operator delete(pointer, std::align_val_t(kLine)); }};
  block.keeper_ = std::make_shared<const std::shared_ptr<std::byte>>(block.data_);
  block.ticket_ = {.source = Source::Heap, .pid = ::getpid(), .size = size, .data = block.keeper_.get()};
  return block;
}

SharedBlock SharedBlock::on_memfd(size_t size, Commit commit) {
  SharedBlock block;
  auto fd = std::make_shared<Fd>(::memfd_create("tessera", MFD_CLOEXEC));
  if (!*fd) throw IoError("no shared memory: memfd_create: {}", std::strerror(errno));
  if (::ftruncate(fd->get(), static_cast<off_t>(size + sizeof(uint64_t))) != 0) {
    throw IoError("no {} bytes of shared memory: {}", size, std::strerror(errno));
  }
  block.ticket_ = {.source = Source::Memfd, .fd = fd->get(), .pid = ::getpid(), .size = size, .nonce = fresh_nonce()};
  block.fd_ = std::move(fd);
  block.commit(commit == Commit::Now ? 0 : size, commit == Commit::Now ? size + sizeof(uint64_t) : sizeof(uint64_t));
  block.data_ = map(block.fd_->get(), size);
  std::memcpy(block.data_.get() + size, &block.ticket_.nonce, sizeof(uint64_t));
  return block;
}

void SharedBlock::commit(size_t begin, size_t size) const {
  if (!fd_ || size == 0) return;
  if (const int failure = ::posix_fallocate(fd_->get(), static_cast<off_t>(begin), static_cast<off_t>(size)); failure != 0) {
    throw IoError("no {} bytes of shared memory: {}", size, std::strerror(failure));
  }
}

SharedBlock SharedBlock::open(const Ticket& ticket) {
  SharedBlock block;
  block.ticket_ = ticket;
  if (ticket.source == Source::Heap) {
    if (ticket.pid != ::getpid()) throw IoError("only threads of one process can share heap memory");
    block.data_ = *ticket.data;
    return block;
  }
  const auto path = fmt::format("/proc/{}/fd/{}", ticket.pid, ticket.fd);
  block.fd_ = std::make_shared<Fd>(::open(path.c_str(), O_RDWR | O_CLOEXEC));
  const auto& fd = *block.fd_;
  if (!fd) throw IoError("can't open the shared memory of process {}: {}: {}", ticket.pid, path, std::strerror(errno));
  // If the ranks run in different containers, the pid may belong to another process here.
  struct stat status {};
  if (::fstat(fd.get(), &status) == 0 && status.st_size == static_cast<off_t>(ticket.size + sizeof(uint64_t))) {
    block.data_ = map(fd.get(), ticket.size);
    if (std::memcmp(block.data_.get() + ticket.size, &ticket.nonce, sizeof(uint64_t)) == 0) return block;
  }
  throw IoError("{} is not the shared memory that was announced; do the ranks run in separate containers?", path);
}

std::shared_ptr<std::byte> SharedBlock::map(int fd, size_t size) {
  const size_t length = size + sizeof(uint64_t);
  void* memory = ::mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) throw IoError("can't map {} bytes of shared memory: {}", size, std::strerror(errno));
  ::madvise(memory, length, MADV_HUGEPAGE);  // has no effect where huge pages are disabled
  return {static_cast<std::byte*>(memory), [length](std::byte* pointer) { ::munmap(pointer, length); }};
}

}  // namespace tessera
