// Adds up what a test takes from the allocator.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <memory>

namespace tessera::testing {

/// The bytes that this thread takes from libtorch's allocator while the object lives, freed or not.
class Allocations {
 public:
  int64_t bytes() const { return report_->bytes; }
  /// The part of bytes() that is not freed yet.
  int64_t held() const { return report_->held; }
  /// The peak of held().
  int64_t peak() const { return report_->peak; }

 private:
  struct Report final : c10::MemoryReportingInfoBase {
    int64_t bytes = 0, held = 0, peak = 0;
    bool memoryProfilingEnabled() const override { return true; }
    void reportMemoryUsage(void*, int64_t size, size_t, size_t, c10::Device) override {
      bytes += std::max<int64_t>(size, 0);
      held += size;
      peak = std::max(peak, held);
    }
  };
  const std::shared_ptr<Report> report_ = std::make_shared<Report>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, report_};
};

}  // namespace tessera::testing
