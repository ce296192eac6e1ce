// Profile: what a rank spends its time with, as a trace that chrome://tracing and Perfetto show.
#pragma once

#include <filesystem>

namespace tessera::train {

struct ProfileOptions {
  std::filesystem::path output_trace_dir = "profile";
  bool profile_memory = false;  // each allocation
  bool with_flops = false;      // of matrix products and convolutions, by formula
};

/// From its construction to its end, libtorch's profiler records the operators of this thread, and of the backward passes that it starts,
/// beside what Tessera waits for ("tessera::unshard layers.3"). A process has one at a time. It records no shapes of inputs, for which it
/// would have to read parameters before their operator has them.
class [[nodiscard]] Profile {
 public:
  Profile(const ProfileOptions& options, int rank);
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
  ~Profile();  // finishes; what goes wrong then is a warning

  const std::filesystem::path& path() const { return path_; }
  /// Ends the recording and writes the trace. Throws IoError. Must be called on the thread that has begun it.
  void finish();

 private:
  std::filesystem::path path_;
  bool runs_ = false;
};

}  // namespace tessera::train
