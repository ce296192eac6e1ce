// Profile: records what a rank spends its time on, as a trace that chrome://tracing and Perfetto show.
#pragma once

#include <filesystem>
#include <memory>

namespace tessera {
class Record;
}

namespace tessera::train {

struct ProfileOptions {
  std::filesystem::path output_trace_dir = "profile";
  bool profile_memory = false;  // records each allocation
  bool with_flops = false;      // estimates the floating-point operations of matrix products and convolutions from their sizes
};

/// While a Profile exists, libtorch's profiler records the operators of this thread and of the backward passes that the thread starts, and also
/// Tessera's waits ("tessera::unshard layers.3"). finish() adds the record of the rank, on the same clock. A process can have one Profile at a
/// time. The profiler does not record the shapes of inputs,
/// because it would read parameters before they are gathered for their operator.
class [[nodiscard]] Profile {
 public:
  Profile(const ProfileOptions& options, std::shared_ptr<const Record> record);
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
  ~Profile();  // calls finish(); errors become warnings

  const std::filesystem::path& path() const { return path_; }
  /// Ends the recording and writes the trace. Throws IoError. Must be called on the thread that made the object.
  void finish();

 private:
  std::filesystem::path path_;
  std::shared_ptr<const Record> record_;
  double began_;  // unix time
  bool runs_ = false;
};

}  // namespace tessera::train
