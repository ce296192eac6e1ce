#include "tessera/train/profile.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <string_view>
#include <utility>

#include "tessera/base/atomic_write.h"
#include "tessera/base/clock.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"
#include "tessera/comm/record.h"
#include "tessera/comm/trace.h"

namespace tessera::train {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

std::atomic<bool> is_profiled = false;

/// Adds the record's events from the unix time `began` on to a file of libtorch's profiler, whose times are microseconds since
/// "baseTimeNanoseconds".
void merge(const std::filesystem::path& path, const Record& record, double began) {
  constexpr std::string_view kBase = "\"baseTimeNanoseconds\": ", kEvents = "\"traceEvents\": [";
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), {}};
  const auto base = text.find(kBase), events = text.find(kEvents);
  if (base == std::string::npos || events == std::string::npos)
    throw IoError("{} has another form than libtorch's profiler used to write, so it lacks the record of the rank", path);
  const auto nanoseconds = std::strtoll(text.c_str() + base + kBase.size(), nullptr, 10);
  text.insert(events + kEvents.size(), "\n" + trace_events(record, static_cast<double>(nanoseconds) / 1e9, began) + ",");
  write_text(path, text);
}

}  // namespace

Profile::Profile(const ProfileOptions& options, std::shared_ptr<const Record> record)
    : path_(options.output_trace_dir / fmt::format("profile_{}.json", record->rank)), record_(std::move(record)), began_(unix_now()) {
  make_folder(options.output_trace_dir);
  if (is_profiled.exchange(true)) {
    throw UsageError("a profile was begun while another one runs in this process; finish that one first, because libtorch's profiler takes one at a time");
  }
  const ProfilerConfig config(ProfilerState::KINETO, /*report_input_shapes=*/false, options.profile_memory, /*with_stack=*/false,
                              options.with_flops);
  const std::set<ActivityType> activities = {ActivityType::CPU};
  try {
    profiler::prepareProfiler(config, activities);
    profiler::enableProfiler(config, activities);
  } catch (...) {  // the program has started the profiler by itself
    is_profiled = false;
    throw;
  }
  runs_ = true;
}

Profile::~Profile() {
  try {
    finish();
  } catch (const std::exception& error) {
    log(LogLevel::Warning, error.what());
  }
}

void Profile::finish() {
  if (!runs_) return;
  runs_ = false;
  const auto result = profiler::disableProfiler();
  is_profiled = false;
  std::filesystem::remove(path_);
  result->save(path_.string());
  if (!is_there(path_)) throw IoError("the profile could not be written to {}", path_);
  merge(path_, *record_, began_);
}

}  // namespace tessera::train
