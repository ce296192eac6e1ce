// A dry run: TESSERA_DRY_RUN=N makes tessera::init return a world of N simulated ranks, in which the program takes a few steps without
// computing any values. Then what a step would take is printed, and the process ends.
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>

#include "tessera/base/clock.h"
#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/launcher.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/comm/record.h"
#include "tessera/simulate/flops.h"
#include "tessera/simulate/machine.h"
#include "tessera/simulate/memory.h"
#include "tessera/simulate/operators.h"
#include "tessera/simulate/outcome.h"
#include "tessera/simulate/world.h"

namespace tessera::simulate {
namespace {

// The first step makes the optimizer's state, and learns in which order units are used; the second one already follows that order.
constexpr int kSteps = 3;
constexpr int kMostRanks = 1'000'000;

constexpr std::string_view kStep = "optimizer";

struct Clocks {
  double now = 0;    // of the program's thread
  double queue = 0;  // when the operations that were started so far have ended
  bool in_operation = false;

  double shown() const { return in_operation ? queue : now; }
};
Clocks clocks;

class DryRun final : public Simulation, OperatorCosts {
 public:
  DryRun(const Machine& machine, Outcome nothing_yet)
      : machine_(machine), out_(env("TESSERA_DRY_RUN_OUT").value_or("")), outcome_(std::move(nothing_yet)) {
    current_ = this;
    set_clock([] { return clocks.shown(); });
    count_memory([this](const MemoryUse& use) {
      step_.peak = use;
      step_.place = place_;
      present().memory = std::max(present().memory, use.all());
    });
    leave_out_values(*this);
    world_ = made_world();
    world_->record()->on_step([this] {
      take_step();
      if (outcome_.steps == kSteps) end();
    });
  }

  const Communicator& world() const { return *world_; }

  void begin_operation() override {
    clocks.queue = std::max(clocks.queue, clocks.now);
    clocks.in_operation = true;
  }
  double end_operation() override {
    clocks.in_operation = false;
    return clocks.queue;
  }
  void wait_until(double time) override {
    const auto seconds = std::max(0.0, time - clocks.now);
    clocks.now += seconds;
    step_.exposed += seconds;
    present().waits += seconds;
  }
  bool has_come(double time) const override { return time <= clocks.now; }

  void pass_over(uint64_t bytes) override { compute(machine_.pass_seconds(static_cast<double>(bytes))); }
  void update(uint64_t bytes) override {
    const auto seconds = machine_.optimizer_seconds(static_cast<double>(bytes));
    clocks.now += seconds;
    step_.optimizer += seconds;
  }
  void note_memory(uint64_t bytes) override {
    const auto kind = MemoryScope::kind();
    add_memory(kind < 0 ? MemoryKind::Parameters : static_cast<MemoryKind>(kind), bytes);
  }

  void enter(std::string_view phase, std::string_view unit) override {
    if (phase.empty()) return;
    trains_ = true;
    if (phase == kWriting) {  // the optimizer's step enters all units at once
      place_ = "the optimizer's step";
      if (present().pass == kStep) return;
      phase = kStep;
      unit = "";
    } else {
      place_ = fmt::format("{} of {}", phase, unit);
    }
    if (std::exchange(phase_, phase) != phase) take_units();
    const auto memory = memory_in_use().all();
    step_.schedule.push_back({.pass = std::string(phase), .unit = std::string(unit), .begin = clocks.now - begin_, .memory = memory});
  }
  /// Prints or writes the outcome, once. If its file can't be written, says why, prints it, and returns false.
  bool report() {
    if (std::exchange(reported_, true)) return true;
    if (outcome_.steps == 0 && trains_) take_step();
    outcome_.computed = computed_operators();
    const auto put = [](std::FILE* file, const std::string& text) {
      return file != nullptr && std::fwrite(text.data(), 1, text.size(), file) == text.size() && std::fflush(file) == 0;
    };
    if (out_.empty() ? put(stdout, outcome_.to_text()) : put(std::fopen(out_.c_str(), "w"), outcome_.to_json())) return true;
    const std::string why = std::strerror(errno);
    log(LogLevel::Error, "the outcome of the dry run can't be written to {}: {}", out_.empty() ? "standard output" : out_, why);
    if (!out_.empty()) put(stdout, outcome_.to_text());
    return false;
  }

 private:
  Communicator made_world() {
    std::vector<int> hosts;
    for (int rank = 0; rank < outcome_.ranks; rank++) hosts.push_back(rank / outcome_.ranks_per_host);
    const auto count = [this](Operation operation, double seconds, uint64_t bytes, uint64_t across) {
      clocks.queue += seconds;
      step_.communication += seconds;
      (operation == Operation::AllGather || operation == Operation::Broadcast ? step_.gathered : step_.reduced) += bytes;
      step_.across += across;
      present().sends += bytes;
    };
    return simulated_world(Topology(hosts), machine_, count);
  }

  void add(const c10::OperatorHandle& handle, const torch::jit::Stack& stack, double bytes, at::ScalarType dtype) override {
    const auto product = product_of(handle, stack);
    if (!product) return compute(machine_.pass_seconds(bytes));
    step_.flops += product->flops;
    compute(product->is_convolution ? machine_.convolution_seconds(product->flops, dtype)
                                    : machine_.product_seconds(product->flops, product->smallest_side, dtype));
  }
  void add_view() override { compute(machine_.call / 2); }

  void compute(double seconds) {
    (clocks.in_operation ? clocks.queue : clocks.now) += seconds;
    if (clocks.in_operation) return;
    step_.compute += seconds;
    present().computes += seconds;
  }

  /// The present use of a unit; one that nobody reads before the first.
  UnitUse& present() { return step_.schedule.empty() ? before_ : step_.schedule.back(); }

  /// Called while there are models: some programs end without them.
  void take_units() {
    outcome_.units.clear();
    for (const auto& model : world_->record()->figures().models) outcome_.units.insert(outcome_.units.end(), model->begin(), model->end());
  }

  /// The step so far becomes the outcome.
  void take_step() {
    step_.step = clocks.now - begin_;
    outcome_.last = std::exchange(step_, {});
    outcome_.steps++;
    begin_ = clocks.now;
    reset_peak();
  }

  [[noreturn]] void end() {
    const bool good = report();
    std::fflush(nullptr);
    ::_exit(good ? 0 : 1);  // the program would continue with values that nobody has computed
  }

  const Machine machine_;
  const std::string out_;
  Outcome outcome_;
  StepOutcome step_;  // the present one
  UnitUse before_;
  std::string place_ = "the start", phase_;
  double begin_ = 0;  // of the present step
  bool trains_ = false, reported_ = false;
  std::optional<Communicator> world_;
};

/// The world of this process, which is a dry run from now on.
Communicator dry_world(std::chrono::milliseconds limit) {
  static DryRun* run = nullptr;
  if (run == nullptr) {
    if (const auto identity = identity_from_environment(); identity && identity->world_size > 1)
      throw ConfigError(
          "TESSERA_DRY_RUN is set for a program that a launcher has started on {} ranks, but one process simulates all ranks: start the "
          "program by itself, or with tessera launch --dry-run",
          identity->world_size);
    const auto name = env("TESSERA_MACHINE").value_or("cpu");
    auto machine = Machine::named(name);
    const auto text = env("TESSERA_DRY_RUN").value();
    const auto slash = text.find('/');
    const auto ranks = number_of<int>(text.substr(0, slash));
    const auto here = slash == std::string::npos ? machine.ranks_per_host : number_of<int>(text.substr(slash + 1)).value_or(0);
    if (!ranks || *ranks < 1 || *ranks > kMostRanks || here < 1)
      throw ConfigError("TESSERA_DRY_RUN='{}' is not a number of ranks, such as 64, or 64/8 for 8 ranks on each host", text);
    if (*ranks > here && *ranks % here != 0)
      throw ConfigError("TESSERA_DRY_RUN='{}': {} ranks do not fill hosts of {}; simulate a multiple, or TESSERA_DRY_RUN={}/N", text, *ranks,
                        here, *ranks);
    machine.ranks_per_host = std::min(*ranks, here);
    run = new DryRun(machine, {.ranks = *ranks, .ranks_per_host = machine.ranks_per_host, .machine = name});
    std::atexit([] {
      if (run->report()) return;
      std::fflush(nullptr);
      ::_exit(1);
    });
  }
  return run->world().with_limit(limit);
}

const bool is_set = [] {
  Simulation::world = dry_world;
  return true;
}();

}  // namespace
}  // namespace tessera::simulate
