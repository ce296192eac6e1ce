#include "tessera/train/profile.h"

#include <fmt/format.h>
#include <torch/csrc/autograd/profiler_kineto.h>

#include <atomic>
#include <exception>
#include <set>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/log.h"

namespace tessera::train {
namespace {

namespace profiler = torch::autograd::profiler;
using torch::profiler::impl::ActivityType;
using torch::profiler::impl::ProfilerConfig;
using torch::profiler::impl::ProfilerState;

std::atomic<bool> is_profiled = false;

}  // namespace

Profile::Profile(const ProfileOptions& options, int rank) : path_(options.output_trace_dir / fmt::format("profile_{}.json", rank)) {
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
}

}  // namespace tessera::train
