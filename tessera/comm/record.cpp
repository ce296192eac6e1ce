#include "tessera/comm/record.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
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
constexpr size_t kDetails = 32;         // how many operations are kept with all that ranks compare of them
constexpr size_t kMostNames = 8192;
constexpr double kSampling = 10e-3;  // seconds between two samples of the memory of the process

// The only phase whose end is recorded: the library can't see where a forward pass ends.
constexpr std::string_view kInBackward = "backward";
constexpr std::string_view kActivities[] = {"pass", "", "unshard", "reduce", "optimizer"};

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

}  // namespace

struct Record::Details {
  uint64_t entry = 0;
  Envelope envelope = {};
};

Record::Record() : ring_(new Entry[kEntries]), details_(kDetails), to_unix_(unix_now() - seconds_now()) {}
Record::~Record() = default;

/// Returns a copy of the text that lasts as long as the record.
const std::string* Record::kept(std::string_view text) {
  if (const auto known = names_.find(text); known != names_.end()) return &*known;
  return &*names_.emplace(names_.size() < kMostNames ? text : "(another name)").first;
}

uint64_t Record::add(Activity activity, double now, const std::string* name, const std::string* phase) {
  auto& entry = ring_[count_ % kEntries];
  entry = Entry();
  entry.began = entry.ended = now;
  entry.name = name;
  entry.phase = phase;
  entry.activity = activity;
  return count_++;
}

Record::Entry* Record::at(uint64_t entry) {
  return entry < count_ && count_ - entry <= kEntries ? &ring_[entry % kEntries] : nullptr;
}

void Record::leave(uint64_t& open, double now, std::vector<Entry>* over) {
  if (open == 0) return;
  if (auto* const entry = at(std::exchange(open, 0) - 1)) {
    entry->ended = now;
    entry->outcome = Outcome::Done;
    if (over != nullptr && entry->activity == Activity::Unit) over->push_back(*entry);
  }
}

/// Counts the time since the last call for what the program's thread has been doing.
void Record::spend(double now) {
  if (since_ == 0) return;
  const auto passed = now - std::exchange(since_, now);
  auto& seconds = [this]() -> double& {
    if (open_.empty()) return pass_ != 0 ? times_.compute : times_.other;
    const auto activity = open_.back().activity;
    return activity == Activity::Unshard ? times_.unshard : activity == Activity::Reduce ? times_.reduce : times_.optimizer;
  }();
  seconds += passed;
}

void Record::leave_pass(double now, std::vector<Entry>* over) {
  leave(unit_entry_, now, over);
  if (pass_ != 0) spend(now);
  leave(pass_, now, over);
}

void Record::enter(std::string_view phase, std::string_view unit) {
  const auto now = seconds_now();
  sample_memory(now);
  std::vector<Entry> over;
  auto* const told = is_logged(LogLevel::Debug) ? &over : nullptr;
  {
    const std::lock_guard lock(mutex_);
    is_inside_ = phase == kInBackward;
    entered_ = now;
    if (phase.empty()) {
      leave_pass(now, told);
    } else {
      const auto *const name = kept(unit), *const pass = kept(phase);
      phase_ = *pass;
      unit_ = *name;
      if (phase != kWriting) {
        if (pass_ == 0 || pass_name_ != pass) {
          leave_pass(now, told);
          if (since_ == 0) since_ = now;
          spend(now);
          pass_ = add(Activity::Pass, now, pass, pass) + 1;
          pass_name_ = pass;
        }
        leave(unit_entry_, now, told);
        unit_entry_ = add(Activity::Unit, now, name, pass) + 1;
      }
    }
  }
  if (!phase.empty()) note_place(phase, unit);
  tell(over);
}

uint64_t Record::begin(Activity activity, std::string_view unit) {
  const auto now = seconds_now();
  std::vector<Entry> over;
  uint64_t entry = 0;
  {
    const std::lock_guard lock(mutex_);
    if (activity == Activity::Optimizer && unit.empty()) leave_pass(now, is_logged(LogLevel::Debug) ? &over : nullptr);
    spend(now);
    entry = add(activity, now, kept(unit), pass_ != 0 ? pass_name_ : nullptr);
    open_.push_back({.entry = entry, .activity = activity});
  }
  tell(over);
  return entry;
}

uint64_t Record::begin(uint64_t group, const Envelope& envelope) {
  const auto now = seconds_now();
  const std::lock_guard lock(mutex_);
  const auto number = add(Activity::Operation, now, kept(envelope.unit.view()));
  auto& entry = *at(number);
  entry.group = group;
  entry.sequence = envelope.sequence;
  entry.bytes = bytes_of(envelope);
  entry.operation = envelope.operation;
  details_[operations_++ % kDetails] = {.entry = number, .envelope = envelope};
  return number;
}

void Record::end(uint64_t number, Outcome outcome) {
  const auto now = seconds_now();
  std::vector<Entry> over;
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = std::ranges::find(open_, number, &Open::entry); found != open_.end()) {
      spend(now);
      open_.erase(found);
    }
    auto* const entry = at(number);
    if (entry == nullptr) return;
    entry->ended = now;
    entry->outcome = outcome;
    if (entry->activity != Activity::Operation && is_logged(LogLevel::Debug)) over.push_back(*entry);
  }
  tell(over);
}

void Record::note_memory(std::string_view kind, uint64_t bytes) {
  const auto now = seconds_now();
  const std::lock_guard lock(mutex_);
  at(add(Activity::Memory, now, kept(kind)))->bytes = bytes;
}

void Record::sample_memory(double now) {
  const auto last = sampled_.load(std::memory_order_relaxed);
  if (now >= last && now - last < kSampling) return;
  sampled_ = now;
  note_memory("process", resident_bytes());
}

/// Logs what is over as lines: "step 3: unshard of 'layers.3' in backward took 1.2 ms".
void Record::tell(const std::vector<Entry>& over) const {
  for (const auto& entry : over) {
    const auto* const in = entry.phase == nullptr ? "" : entry.phase->c_str();
    auto what = entry.activity == Activity::Unit ? std::string(in) : std::string(kActivities[static_cast<size_t>(entry.activity)]);
    if (!entry.name->empty()) what += fmt::format(" of '{}'", *entry.name);
    if (entry.activity != Activity::Unit && *in != '\0') what += fmt::format(" in {}", in);
    log(LogLevel::Debug, "step {}: {} took {:.3f} ms", steps_.load(), what, (entry.ended - entry.began) * 1e3);
  }
}

void Record::remove_optimizer(const void* optimizer) {
  optimizers_--;
  const std::lock_guard lock(mutex_);
  if (counts_steps_ == optimizer) counts_steps_ = nullptr;
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
  const std::lock_guard lock(models_mutex_);
  models_.insert(models_.begin(), models.begin(), models.end());
  return sum;
}

Record::Times Record::take_times() {
  const std::lock_guard lock(mutex_);
  spend(seconds_now());
  return std::exchange(times_, {});
}

std::string Record::place_now() const {
  return unit_.empty() ? std::string(phase_) : fmt::format("{} of '{}'", phase_, unit_);
}

std::string Record::place() const {
  const std::lock_guard lock(mutex_);
  return place_now();
}

Record::Snapshot Record::snapshot() const {
  const std::lock_guard lock(mutex_);
  Snapshot result{.entries = {},
                  .operations = {},
                  .place = place_now(),
                  .is_inside = is_inside_,
                  .entered = entered_,
                  .now = seconds_now(),
                  .to_unix = to_unix_};
  const auto have = std::min<uint64_t>(count_, kEntries), first = count_ - have;
  result.entries.reserve(have);
  for (auto number = first; number < count_; number++) result.entries.push_back(ring_[number % kEntries]);
  for (auto number = operations_ - std::min<uint64_t>(operations_, kDetails); number < operations_; number++) {
    const auto& [entry, envelope] = details_[number % kDetails];
    if (entry >= first) result.operations.emplace_back(result.entries[entry - first], envelope.describe());
  }
  return result;
}

uint64_t resident_bytes() {
  // Kept open, because it is read often, and also while the process ends.
  static const auto& file = *new Fd(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  char text[128];
  const auto size = ::pread(file.get(), text, sizeof(text), 0);
  const auto* const end = text + std::max<ssize_t>(size, 0);
  uint64_t pages = 0;
  const auto* const second = std::find(static_cast<const char*>(text), end, ' ');
  if (second != end) std::from_chars(second + 1, end, pages);
  return pages * static_cast<uint64_t>(::sysconf(_SC_PAGESIZE));
}

}  // namespace tessera
