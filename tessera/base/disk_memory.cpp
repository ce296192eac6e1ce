#include "tessera/base/disk_memory.h"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/mman.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <mutex>
#include <string>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/no_copy.h"

namespace tessera {
namespace {

/// Opens a file without a name, which disappears when it is closed. If that is not possible in the folder, returns an empty Fd, with the
/// reason in errno.
Fd nameless_file(const std::filesystem::path& folder) {
  Fd file(::open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
  if (file || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
  auto name = (folder / "tessera-XXXXXX").string();  // for file systems without O_TMPFILE
  file = Fd(::mkostemp(name.data(), O_CLOEXEC));
  if (file) ::unlink(name.c_str());
  return file;
}

uintptr_t page_size() {
  static const auto size = static_cast<uintptr_t>(::sysconf(_SC_PAGESIZE));
  return size;
}

/// The parts of the address space that are mapped from files.
class Mapped {
 public:
  static Mapped& all() {
    static auto& all = *new Mapped;  // never destroyed: tensors may outlive this library's objects
    return all;
  }

  void add(uintptr_t begin, uintptr_t end) {
    const std::lock_guard lock(mutex_);
    ends_[begin] = end;
    count_++;
  }
  void remove(uintptr_t begin) {
    const std::lock_guard lock(mutex_);
    ends_.erase(begin);
    count_--;
  }

  /// Advises the system about the pages that lie wholly inside both the bytes and a mapped part.
  void advise(const void* from, size_t bytes, int advice) noexcept {
    if (count_ == 0) return;
    const std::lock_guard lock(mutex_);  // held until madvise() returns, so that nobody unmaps the part before
    auto begin = reinterpret_cast<uintptr_t>(from);
    auto end = begin + bytes;
    auto part = ends_.upper_bound(begin);
    if (part == ends_.begin()) return;
    part--;
    begin = (std::max(begin, part->first) + page_size() - 1) / page_size() * page_size();
    end = std::min(end, part->second) / page_size() * page_size();
    if (begin < end) ::madvise(reinterpret_cast<void*>(begin), end - begin, advice);
  }

 private:
  std::mutex mutex_;
  std::map<uintptr_t, uintptr_t> ends_;  // maps the begin of each part to its end
  std::atomic<size_t> count_ = 0;
};

/// The mapping that a DataPtr owns.
class Region : NoCopy {
 public:
  Region(size_t bytes, size_t on_disk, const std::filesystem::path& folder, std::string_view what) : bytes_(bytes) {
    const auto fail = [&](int error) {
      throw IoError("can't keep {} in a file of {} bytes in {}: {}", what, on_disk, folder, std::strerror(error));
    };
    const auto file = nameless_file(folder);
    if (!file) fail(errno);
    if (const int error = ::posix_fallocate(file.get(), 0, static_cast<off_t>(on_disk)); error != 0) fail(error);
    data_ = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data_ == MAP_FAILED) fail(errno);
    if (::mmap(data_, on_disk, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) {
      const int error = errno;
      ::munmap(data_, bytes);
      fail(error);
    }
    const auto begin = reinterpret_cast<uintptr_t>(data_);
    Mapped::all().add(begin, begin + on_disk);
  }
  ~Region() {
    Mapped::all().remove(reinterpret_cast<uintptr_t>(data_));
    ::munmap(data_, bytes_);
  }

  void* data() const { return data_; }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

}  // namespace

std::filesystem::path folder_of(const DiskMemoryOptions& options) {
  return options.folder.empty() ? std::filesystem::path(env("TMPDIR").value_or("/tmp")) : options.folder;
}

void expect_sensible(const DiskMemoryOptions& options) {
  if (!(options.fraction >= 0 && options.fraction <= 1))
    throw ConfigError("the fraction to keep on disk is {}; it must be between 0 and 1", options.fraction);
  const auto folder = folder_of(options);
  struct statfs status = {};
  if (::statfs(folder.c_str(), &status) != 0)
    throw ConfigError("the folder {} can't be used to keep memory on disk: {}", folder, std::strerror(errno));
  if (status.f_type == TMPFS_MAGIC || status.f_type == RAMFS_MAGIC) {
    throw ConfigError("the folder {} lies in memory (tmpfs), so it would save no memory; name a folder on a disk, or set TMPDIR", folder);
  }
}

at::DataPtr allocate_on_disk(size_t bytes, const DiskMemoryOptions& options, std::string_view what) {
  const auto pages = [](double wanted) { return static_cast<size_t>(std::ceil(wanted / static_cast<double>(page_size()))) * page_size(); };
  const auto on_disk = std::min(pages(static_cast<double>(bytes) * options.fraction), pages(static_cast<double>(bytes)));
  if (on_disk == 0) {
    auto memory = c10::GetAllocator(at::kCPU)->allocate(bytes);
    if (bytes > 0) std::memset(memory.get(), 0, bytes);
    return memory;
  }
  auto* const region = new Region(pages(static_cast<double>(bytes)), on_disk, folder_of(options), what);
  return {region->data(), region, [](void* kept) { delete static_cast<Region*>(kept); }, at::Device(at::kCPU)};
}

void evict_pages(const void* begin, size_t bytes) noexcept {
  Mapped::all().advise(begin, bytes, MADV_DONTNEED);
}

void read_pages_ahead(const void* begin, size_t bytes) noexcept {
  Mapped::all().advise(begin, bytes, MADV_WILLNEED);
}

}  // namespace tessera
