// The clock of records, traces and progress: a steady clock, or that of a simulation.
#pragma once

#include <atomic>
#include <chrono>

namespace tessera {

inline double seconds_of_steady_clock() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

inline std::atomic<double (*)()> clock_source = seconds_of_steady_clock;

/// Seconds of a steady clock, or of the simulation.
inline double seconds_now() {
  return clock_source.load(std::memory_order_relaxed)();
}

inline double unix_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Replaces the clock of this process. Null gives the steady clock back.
inline void set_clock(double (*source)()) {
  clock_source = source != nullptr ? source : seconds_of_steady_clock;
}

}  // namespace tessera
