#include <c10/core/StreamGuard.h>

#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/event.h"
#include "tests/testing/delayed_device.h"

namespace tessera::testing {
namespace {

struct Queued final : c10d::Work {
  explicit Queued(Event end) : end(std::move(end)) {}
  bool wait(std::chrono::milliseconds /*timeout*/) override {
    end.block();  // makes the device wait, and not the host
    return true;
  }
  const Event end;
};

class DelayedBackend final : public c10d::Backend {
 public:
  DelayedBackend(int rank, int size) : Backend(rank, size), stream_(new_stream()) {}

  const std::string getBackendName() const override { return "delayed"; }

  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& whole, at::Tensor& own, const c10d::AllgatherOptions& /*options*/) override {
    return queue([to = static_cast<std::byte*>(whole.data_ptr()), from = own.data_ptr(), bytes = own.nbytes(), size = size_] {
      for (int rank = 0; rank < size; rank++) std::memmove(to + static_cast<size_t>(rank) * bytes, from, bytes);
    });
  }

  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options) override {
    const auto& tensor = tensors.front();
    const auto times = options.reduceOp == c10d::ReduceOp::SUM ? static_cast<float>(size_) : 1.0F;
    return queue([values = tensor.data_ptr<float>(), count = tensor.numel(), times] {
      for (int64_t i = 0; i < count; i++) values[i] *= times;
    });
  }

  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& own, at::Tensor& whole,
                                                      const c10d::ReduceScatterOptions& /*options*/) override {
    return queue([to = own.data_ptr<float>(), from = whole.data_ptr<float>() + rank_ * own.numel(), count = own.numel(), size = size_] {
      for (int64_t i = 0; i < count; i++) to[i] = from[i] * static_cast<float>(size);
    });
  }

 private:
  c10::intrusive_ptr<c10d::Work> queue(std::function<void()> work) const {
    const auto inputs = Event::record(stream_.device());
    const c10::StreamGuard own(stream_);
    inputs.block();
    enqueue(std::move(work));
    return c10::make_intrusive<Queued>(Event::record(stream_.device()));
  }

  const c10::Stream stream_;
};

}  // namespace

c10::intrusive_ptr<c10d::Backend> delayed_backend(int rank, int size) {
  return c10::make_intrusive<DelayedBackend>(rank, size);
}

}  // namespace tessera::testing
