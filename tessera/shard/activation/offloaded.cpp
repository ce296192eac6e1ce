#include "tessera/shard/activation/offloaded.h"

#include <ATen/ATen.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <mutex>
#include <thread>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/base/nameless_file.h"
#include "tessera/shard/storage/paged_tensor.h"

namespace tessera::activation {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostWaiting = size_t{256} << 20;  // bytes that wait to be written; forward waits for the disk beyond that

/// On a device, the copies are queued after what has made the values and before what reads them, in one stream.
class OnHost final : public Offloaded {
 public:
  explicit OnHost(const at::Tensor& tensor)
      : Offloaded(tensor),
        device_(tensor.device()),
        values_(at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kCPU).pinned_memory(tensor.is_cuda()))) {
    values_.copy_(tensor, /*non_blocking=*/true);
  }
  at::Tensor get() override {
    const Unrecorded unrecorded;
    return values_.to(device_, /*non_blocking=*/true);
  }
  void finish() override {}

 private:
  const c10::Device device_;
  const at::Tensor values_;
};

class OnDisk final : public Offloaded, public std::enable_shared_from_this<OnDisk> {
 public:
  OnDisk(const at::Tensor& tensor, const fs::path& folder);

  at::Tensor get() override;
  void finish() override;

  size_t bytes() const { return bytes_; }
  /// Called by the thread of the disk.
  void work();
  /// Starts to write.
  void start(const std::shared_ptr<OnDisk>& before);

 private:
  enum class State { Waiting, Stored, Reading, Read };

  void read_ahead();
  /// If the values are on disk only. Needs the lock, so that they can't come to be there between a look and the wait.
  void begin_to_read();
  [[noreturn]] void fail(const char* what) const;
  template <class Transfer>
  void all_bytes(const char* what, const at::Tensor& values, const Transfer& transfer) const;

  const std::string folder_;
  const c10::Device device_;
  const at::TensorOptions options_;
  const std::vector<int64_t> sizes_, strides_;
  const size_t bytes_;
  Fd file_;
  std::weak_ptr<OnDisk> before_;  // what backward needs after this
  std::mutex mutex_;
  std::condition_variable changed_;
  State state_ = State::Waiting;
  at::Tensor values_;  // while it is Waiting or Read
  uint32_t version_ = 0;
  std::exception_ptr error_;
};

/// Reads and writes beside the computation.
class DiskThread {
 public:
  static DiskThread& instance() {
    static auto* const thread = new DiskThread;  // never destroyed, because graphs may be longer-lived than main
    return *thread;
  }

  void write(const std::shared_ptr<OnDisk>& what) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return waiting_ == 0 || waiting_ + what->bytes() <= kMostWaiting; });
    waiting_ += what->bytes();
    queue_.push_back({.what = what, .written = what->bytes()});
    changed_.notify_all();
  }
  void read(const std::shared_ptr<OnDisk>& what) {
    const std::lock_guard lock(mutex_);
    queue_.push_front({.what = what, .written = 0});
    changed_.notify_all();
  }

 private:
  struct Job {
    std::weak_ptr<OnDisk> what;
    size_t written;
  };

  DiskThread() {
    std::thread([this] { run(); }).detach();
  }
  void run() {
    std::unique_lock lock(mutex_);
    while (true) {
      changed_.wait(lock, [&] { return !queue_.empty(); });
      const auto [what, written] = std::move(queue_.front());
      queue_.pop_front();
      lock.unlock();
      if (const auto on_disk = what.lock()) on_disk->work();
      lock.lock();
      waiting_ -= written;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> queue_;
  size_t waiting_ = 0;
};

OnDisk::OnDisk(const at::Tensor& tensor, const fs::path& folder)
    : Offloaded(tensor),
      folder_(folder.string()),
      device_(tensor.device()),
      options_(tensor.options().device(at::kCPU)),
      sizes_(tensor.sizes().vec()),
      strides_(tensor.strides().vec()),
      bytes_(tensor.nbytes()),
      file_(nameless_file(folder)),
      values_(tensor.device().is_cpu() ? tensor : at::empty_strided(sizes_, strides_, options_).copy_(tensor)),
      version_(version_of(values_)) {
  if (!file_) fail("make a file for activations in");
  // A disk that is full is found out here, where the caller still hears of it.
  if (::fallocate(file_.get(), 0, 0, static_cast<off_t>(bytes_)) != 0 && errno != EOPNOTSUPP) fail("write activations to");
}

void OnDisk::fail(const char* what) const {
  throw IoError(fmt::format("can't {} {}: {}; name another folder in activation::Options::disk, or leave OffloadTo::Disk out", what,
                            folder_, std::strerror(errno)));
}

void OnDisk::start(const std::shared_ptr<OnDisk>& before) {
  before_ = before;
  DiskThread::instance().write(shared_from_this());
}

template <class Transfer>
void OnDisk::all_bytes(const char* what, const at::Tensor& values, const Transfer& transfer) const {
  auto* const memory = static_cast<char*>(const_cast<void*>(values.const_data_ptr()));
  for (size_t done = 0; done < bytes_;) {
    const auto some = transfer(file_.get(), memory + done, bytes_ - done, static_cast<off_t>(done));
    if (some > 0) {
      done += static_cast<size_t>(some);
    } else if (some == 0 || errno != EINTR) {
      fail(what);
    }
  }
}

void OnDisk::work() {
  std::unique_lock lock(mutex_);
  const bool writes = state_ == State::Waiting;
  const auto values = writes ? values_ : at::empty_strided(sizes_, strides_, options_);
  lock.unlock();
  std::exception_ptr error;
  try {
    if (writes) {
      all_bytes("write activations to", values, ::pwrite);
      expect_version(values, version_);
    } else {
      all_bytes("read activations from", values, ::pread);
    }
  } catch (...) {
    error = std::current_exception();
  }
  lock.lock();
  error_ = error;
  state_ = writes ? State::Stored : State::Read;
  values_ = writes ? at::Tensor() : values;
  changed_.notify_all();
}

void OnDisk::begin_to_read() {
  if (state_ != State::Stored || error_) return;
  state_ = State::Reading;
  DiskThread::instance().read(shared_from_this());
}

void OnDisk::read_ahead() {
  const std::lock_guard lock(mutex_);
  begin_to_read();
}

at::Tensor OnDisk::get() {
  std::unique_lock lock(mutex_);
  begin_to_read();
  if (const auto before = std::exchange(before_, {}).lock()) before->read_ahead();  // once, for it may be used up the next time
  changed_.wait(lock, [&] { return error_ || state_ != State::Reading; });
  if (error_) std::rethrow_exception(error_);
  const bool was_read = state_ == State::Read;
  if (!was_read) expect_version(values_, version_);
  const auto values = was_read ? std::exchange(values_, {}) : values_;
  if (was_read) state_ = State::Stored;
  lock.unlock();
  const Unrecorded unrecorded;
  return values.to(device_);
}

void OnDisk::finish() {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return state_ != State::Waiting; });
}

}  // namespace

std::shared_ptr<Offloaded> Offloaded::make(const at::Tensor& tensor, const Options& options) {
  const Unrecorded unrecorded;
  if (options.offload == OffloadTo::Host) return std::make_shared<OnHost>(tensor);
  thread_local std::weak_ptr<OnDisk> last;
  auto made = std::make_shared<OnDisk>(tensor, folder_of(options.disk));
  made->start(last.lock());
  last = made;
  return made;
}

bool should_offload(const at::Tensor& tensor, const Options& options) {
  if (options.offload == OffloadTo::Nowhere || (options.offload == OffloadTo::Host && tensor.is_cpu())) return false;
  if (is_paged(tensor) || (tensor.is_leaf() && tensor.requires_grad()) || !tensor.has_storage()) return false;
  if (tensor.numel() == 0 || !tensor.is_non_overlapping_and_dense()) return false;
  if (options.offload != OffloadTo::Disk || options.disk.fraction == 1) return true;
  thread_local double owed = 0;  // bytes that should be on disk for the fraction, and are not yet
  owed += options.disk.fraction * static_cast<double>(tensor.nbytes());
  if (owed < static_cast<double>(tensor.nbytes())) return false;
  owed -= static_cast<double>(tensor.nbytes());
  return true;
}

}  // namespace tessera::activation
