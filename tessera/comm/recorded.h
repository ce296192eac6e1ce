// Recorded: a wait or a step as long as the object exists, in a rank's record and in libtorch's profiler.
#pragma once

#include <ATen/record_function.h>
#include <fmt/format.h>

#include <string_view>

#include "tessera/base/no_copy.h"
#include "tessera/comm/record.h"

namespace tessera {

/// The profiler shows it as "tessera::unshard layers.3".
class [[nodiscard]] Recorded : NoCopy {
 public:
  /// `record` may be null.
  Recorded(Record* record, Activity activity, std::string_view name, std::string_view unit = {})
      : record_(record), entry_(record != nullptr ? record->begin(activity, unit) : 0) {
    if (profiled_.isActive()) profiled_.before(fmt::format("tessera::{}{}{}", name, unit.empty() ? "" : " ", unit));
  }
  ~Recorded() {
    if (record_ != nullptr) record_->end(entry_);
  }

 private:
  Record* const record_;
  const uint64_t entry_;
  at::RecordFunction profiled_{at::RecordScope::USER_SCOPE};
};

}  // namespace tessera
