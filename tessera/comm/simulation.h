// Simulation: what the library asks in a dry run, in which tensors have no values and a clock counts the seconds that work would take.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <utility>

namespace tessera {

class Communicator;

/// The use of memory.
enum class MemoryKind : uint8_t { Parameters, Gradients, Optimizer, Unsharded, Reduction, Activations };
inline constexpr size_t kMemoryKinds = 6;
constexpr std::string_view name(MemoryKind kind) {
  constexpr std::string_view kNames[kMemoryKinds] = {"parameters", "gradients", "optimizer", "unsharded", "reduction", "activations"};
  return kNames[static_cast<size_t>(kind)];
}

/// While it lives, memory that this thread allocates is of this kind.
class MemoryScope {
 public:
  explicit MemoryScope(MemoryKind kind) : before_(std::exchange(kind_, static_cast<int>(kind))) {}
  MemoryScope(const MemoryScope&) = delete;
  MemoryScope& operator=(const MemoryScope&) = delete;
  ~MemoryScope() { kind_ = before_; }

  /// The kind of the innermost scope; -1 outside of scopes.
  static int kind() { return kind_; }

 private:
  inline static thread_local int kind_ = -1;
  const int before_;
};

class Simulation {
 public:
  virtual ~Simulation() = default;
  Simulation() = default;
  Simulation(const Simulation&) = delete;
  Simulation& operator=(const Simulation&) = delete;

  /// Null unless this process is a dry run.
  static Simulation* current() { return current_; }
  /// The world of a dry run. Set where dry runs are implemented.
  inline static Communicator (*world)(std::chrono::milliseconds limit) = nullptr;

  /// The clock shows the time in the queue of operations until end_operation(), which returns when the operation ends.
  virtual void begin_operation() = 0;
  virtual double end_operation() = 0;
  virtual void wait_until(double time) = 0;
  virtual bool has_come(double time) const = 0;

  /// A loop of the library, which the caller leaves out, would read and write so many bytes in all.
  virtual void pass_over(uint64_t bytes) = 0;
  /// The same for the fused loop of an optimizer.
  virtual void update(uint64_t bytes) = 0;
  /// Memory besides tensors: this rank's share of what the ranks of a host share.
  virtual void note_memory(uint64_t bytes) = 0;

  virtual void enter(std::string_view phase, std::string_view unit) = 0;

 protected:
  inline static Simulation* current_ = nullptr;
};

}  // namespace tessera
