#include "tessera/comm/record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

#include "tessera/base/clock.h"
#include "tessera/base/fd.h"
#include "tessera/base/last_words.h"
#include "tessera/base/log.h"
#include "tessera/comm/control/envelope.h"

namespace tessera {
namespace {

constexpr size_t kEntries = 16'384;
constexpr size_t kDetailed = 32;      // how many operations are kept with all that ranks compare of them
constexpr size_t kMostNames = 8192;
constexpr double kSampling = 10e-3;  // seconds between two samples of the memory of the process

// The only phase whose end is recorded: the library can't see where a forward pass ends.
constexpr std::string_view kInBackward = "backward";
constexpr std::string_view kActivities[] = {"pass", "unit", "unshard", "reduce", "optimizer", "collective", "memory"};

uint64_t bytes_of(const Envelope& envelope) {
  switch (envelope.operation) {
    case Operation::AllGather:
    case Operation::ReduceScatter:
    case Operation::AllReduce:
    case Operation::Broadcast:
      return static_cast<uint64_t>(envelope.numel) * c10::elementSize(static_cast<c10::ScalarType>(envelope.dtype));
    default:
      return 0;
  }
}

/// Returns the difference of both clocks. A pause between two looks makes it smaller, so the largest of some is the best.
double steady_to_unix() {
  double most = std::numeric_limits<double>::lowest();
  for (int look = 0; look < 20; look++) {
    const auto unix = unix_now();
    most = std::max(most, unix - seconds_now());
  }
  return most;
}

}  // namespace

struct Record::Details {
  uint64_t entry = 0;
  Envelope envelope = {};
};

Record::Record() : ring_(new Entry[kEntries]), details_(kDetailed), to_unix_(steady_to_unix()) {}
Record::~Record() = default;

/// Returns a copy of the text that lasts as long as the record.
const std::string* Record::kept(std::string_view text) {
  if (const auto known = names_.find(text); known != names_.end()) return &*known;
  return &*names_.emplace(names_.size() < kMostNames ? text : "(another name)").first;
}

Record::Entry& Record::add(Activity activity, double now, std::string_view name) {
  auto& entry = ring_[count_++ % kEntries];
  entry = Entry();
  entry.began = entry.ended = now;
  entry.name = kept(name);
  entry.phase = pass_;
  entry.activity = activity;
  return entry;
}

uint64_t Record::open(Activity activity, double now, std::string_view name) {
  spend(now);
  open_.push_back({.entry = count_, .activity = activity});
  add(activity, now, name);
  return open_.back().entry;
}

void Record::close(uint64_t number, double now, Outcome outcome) {
  spend(now);
  std::erase_if(open_, [&](const Open& each) { return each.entry == number; });
  if (count_ - number > kEntries) return;  // later entries have taken its place
  auto& entry = ring_[number % kEntries];
  entry.ended = now;
  entry.outcome = outcome;
  if (is_logged(LogLevel::Debug)) tell(entry);
}

/// Ends the unit, and if it is the activity to end, also the pass.
void Record::leave(Activity activity, double now) {
  for (const auto each : {Activity::Unit, activity}) {
    const auto found = std::ranges::find(open_, each, &Open::activity);
    if (found != open_.end()) close(found->entry, now, Outcome::Done);
  }
  if (activity == Activity::Pass) pass_ = nullptr;
}

/// Counts the time since the last call for what the program's thread has been doing.
void Record::spend(double now) {
  if (since_ == 0) return;
  const auto passed = now - std::exchange(since_, now);
  if (open_.empty()) {
    times_.other += passed;
    return;
  }
  const auto activity = open_.back().activity;
  auto& seconds = activity == Activity::Unshard     ? times_.unshard
                  : activity == Activity::Reduce    ? times_.reduce
                  : activity == Activity::Optimizer ? times_.optimizer
                                                    : times_.compute;
  seconds += passed;
}

void Record::enter(std::string_view phase, std::string_view unit) {
  if (!phase.empty()) note_place(phase, unit);
  const std::lock_guard lock(mutex_);
  const auto now = seconds_now();
  if (now - sampled_ >= kSampling) {
    sampled_ = now;
    add(Activity::Memory, now, "process").bytes = resident_bytes();
  }
  is_inside_ = phase == kInBackward;
  entered_ = now;
  if (phase.empty()) {
    leave(Activity::Pass, now);
    return;
  }
  phase_ = phase;
  unit_ = unit;
  if (phase == kWriting) return;
  if (pass_ == nullptr || *pass_ != phase) {
    leave(Activity::Pass, now);
    pass_ = kept(phase);
    if (since_ == 0) since_ = now;
    open(Activity::Pass, now, phase);
  }
  leave(Activity::Unit, now);
  open(Activity::Unit, now, unit);
}

uint64_t Record::begin(Activity activity, std::string_view unit) {
  const std::lock_guard lock(mutex_);
  const auto now = seconds_now();
  if (activity == Activity::Optimizer && unit.empty()) leave(Activity::Pass, now);
  return open(activity, now, unit);
}

uint64_t Record::begin(uint64_t group, const Envelope& envelope) {
  const std::lock_guard lock(mutex_);
  auto& entry = add(Activity::Operation, seconds_now(), envelope.unit.view());
  entry.group = group;
  entry.sequence = envelope.sequence;
  entry.bytes = bytes_of(envelope);
  entry.operation = envelope.operation;
  details_[operations_++ % kDetailed] = {.entry = count_ - 1, .envelope = envelope};
  return count_ - 1;
}

void Record::end(uint64_t number, Outcome outcome) {
  const std::lock_guard lock(mutex_);
  close(number, seconds_now(), outcome);
}

void Record::note_memory(std::string_view kind, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  add(Activity::Memory, seconds_now(), kind).bytes = bytes;
}

/// Logs a line: "step 3: unshard of 'layers.3' in backward took 1.200 ms".
void Record::tell(const Entry& entry) const {
  if (entry.activity == Activity::Pass || entry.activity == Activity::Operation) return;
  const auto pass = entry.phase == nullptr ? std::string() : *entry.phase;
  const bool is_unit = entry.activity == Activity::Unit;
  auto text = is_unit ? pass : std::string(name(entry.activity));
  if (!entry.name->empty()) text += fmt::format(" of '{}'", *entry.name);
  if (!is_unit && !pass.empty()) text += " in " + pass;
  log(LogLevel::Debug, "step {}: {} took {:.3f} ms", steps_, text, (entry.ended - entry.began) * 1e3);
}

void Record::add_optimizer(const void* optimizer, uint64_t bytes) {
  const std::lock_guard lock(mutex_);
  if (optimizers_.empty()) counts_steps_ = nullptr;
  optimizers_[optimizer] += bytes;
}

void Record::remove_optimizer(const void* optimizer) {
  const std::lock_guard lock(mutex_);
  optimizers_.erase(optimizer);
  if (counts_steps_ == optimizer) counts_steps_ = nullptr;
}

void Record::end_backward(const void* model) {
  {
    const std::lock_guard lock(mutex_);
    if (!optimizers_.empty()) return;
  }
  end_step(model);
}

void Record::end_step(const void* by) {
  {
    const std::lock_guard lock(mutex_);
    if (counts_steps_ == nullptr) counts_steps_ = by;
    if (counts_steps_ != by) return;
    spend(seconds_now());
    times_.steps++;
    steps_++;
  }
  if (on_step_) on_step_();
}

void Record::add_model(std::function<bool(ModelFigures&)> count) {
  const std::lock_guard lock(models_mutex_);
  models_.push_back(std::move(count));
}

ModelFigures Record::figures() {
  ModelFigures sum;
  // Not under the mutex, because models take their own locks, under which they call add_model().
  auto models = [this] {
    const std::lock_guard lock(models_mutex_);
    return std::exchange(models_, {});
  }();
  std::erase_if(models, [&](const auto& count) { return !count(sum); });
  {
    const std::lock_guard lock(models_mutex_);
    models_.insert(models_.begin(), models.begin(), models.end());
  }
  const std::lock_guard lock(mutex_);
  for (const auto& [optimizer, bytes] : optimizers_) sum.memory["optimizer"] += bytes;
  return sum;
}

StepTimes Record::take_times() {
  const std::lock_guard lock(mutex_);
  spend(seconds_now());
  return std::exchange(times_, {});
}

std::string Record::place_now() const {
  return unit_.empty() ? phase_ : fmt::format("{} of '{}'", phase_, unit_);
}

std::string Record::place() const {
  const std::lock_guard lock(mutex_);
  return place_now();
}

Record::Snapshot Record::snapshot() const {
  const std::lock_guard lock(mutex_);
  Snapshot result{{}, {}, place_now(), is_inside_, entered_, seconds_now(), to_unix_};
  const auto have = std::min<uint64_t>(count_, kEntries), first = count_ - have;
  result.entries.reserve(have);
  for (auto number = first; number < count_; number++) result.entries.push_back(ring_[number % kEntries]);
  for (auto number = operations_ - std::min<uint64_t>(operations_, kDetailed); number < operations_; number++) {
    const auto& [entry, envelope] = details_[number % kDetailed];
    if (entry >= first) result.operations.emplace_back(result.entries[entry - first], envelope.describe());
  }
  return result;
}

std::string_view name(Activity activity) {
  return kActivities[static_cast<size_t>(activity)];
}

uint64_t resident_bytes() {
  // Without a stream, which would allocate memory in each step.
  const Fd file(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  std::array<char, 128> text{};
  if (!file || ::read(file.get(), text.data(), text.size() - 1) <= 0) return 0;
  const std::string_view numbers(text.data());
  uint64_t resident = 0;
  const auto second = numbers.find(' ') + 1;  // of the numbers, which count pages
  std::from_chars(numbers.data() + second, numbers.data() + numbers.size(), resident);
  return resident * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace tessera
