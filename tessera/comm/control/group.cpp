#include "tessera/comm/control/group.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/SmallVector.h>
#include <fmt/format.h>

#include <algorithm>
#include <ranges>

#include "tessera/base/error.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/comm/control/fill_envelope.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {
namespace {

// How long the destructor waits for operations that were started and not waited for.
constexpr auto kFarewell = std::chrono::seconds(10);

// The name of all time-outs in reports. The first ends all groups, so that there is only one.
constexpr auto kLateRanks = "late";

void expect_one_dtype(std::span<const Piece> pieces) {
  const auto differs = [&](const Piece& piece) { return piece.whole.scalar_type() != pieces.front().whole.scalar_type(); };
  const auto found = std::ranges::find_if(pieces, differs);
  if (found != pieces.end()) throw UsageError("piece {}: pieces of one call must have one dtype", found - pieces.begin());
}

/// The number of the part of a group that an operation makes.
uint64_t number_of_part(uint64_t whole, uint64_t sequence, int color) {
  constexpr uint64_t kMixer = 0x9e3779b97f4a7c15;
  return ((whole ^ (sequence + 1)) * kMixer ^ static_cast<uint64_t>(color + 1)) * kMixer;
}

/// Throws if arguments do not fit, in a group without a link, whose ranks do not compare them.
void expect_fitting(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill) try {
  Envelope unused;
  if (fill) fill(unused);
} catch (const std::exception& error) {
  throw UsageError("{}{}: {}", name(operation), call.subject.unit.empty() ? "" : fmt::format(" of '{}'", call.subject.unit),
                   first_line(error));
}

/// The Work of an operation in the caller's thread, which may have queued something on a device.
struct Queued final : Work::State {
  explicit Queued(Event ready) : ready(std::move(ready)) {}
  void wait() override {}
  bool done() const override { return true; }
  Event ready_event() const override { return ready; }
  const Event ready;
};

}  // namespace

Group::Group(std::unique_ptr<Transport> transport, std::shared_ptr<Link> link, std::shared_ptr<LinkFamily> family)
    : Group(std::move(transport), std::move(link), std::move(family), 0) {}

Group::Group(std::unique_ptr<Transport> transport, std::shared_ptr<Link> link, std::shared_ptr<LinkFamily> family, uint64_t number)
    : transport_(std::move(transport)), link_(std::move(link)), family_(std::move(family)), number_(number) {
  if (!link_) return;
  family_->add(link_, transport_);
  link_->ask([this] { return queue_.waited_for() || meetings_ > 0; }, [this] { return now_.describe(); }, queue_.busy());
}

Group::~Group() {
  // Operations that nobody has waited for may still finish, unless an exception is unwinding this rank.
  if (std::uncaught_exceptions() == 0 && queue_.wait_until_idle(kFarewell)) return;
  if (!queue_.wait_until_idle(std::chrono::milliseconds(0))) {
    link_->abort(fmt::format("rank {} left with operations under way", world_rank()), world_rank());
  }
}

Work Group::all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands, const Call& call) {
  const auto fill = [&](Envelope& envelope) {
    describe(envelope, pieces, traits());
    expect_one_dtype(pieces);
    for (const auto& piece : pieces) {
      if (piece.own.scalar_type() != piece.whole.scalar_type()) throw UsageError("own and whole differ in dtype");
    }
  };
  return start(
      Operation::AllGather, call, fill,
      [this, pieces = c10::SmallVector<Piece, 2>(pieces.begin(), pieces.end()), operands = link_ ? std::span<at::Tensor>() : operands](
          const Launch& start) { return transport_->all_gather(pieces, operands, start); });
}

Work Group::reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Call& call) {
  const auto fill = [&](Envelope& envelope) {
    describe(envelope, pieces, traits());
    expect_one_dtype(pieces);
    if (pieces.empty()) return;
    const auto complete = resolved(reduction, pieces.front().whole);
    describe(envelope, complete);
    expect_reducible(complete, pieces.front().whole.scalar_type(), pieces);
  };
  return start(Operation::ReduceScatter, call, fill,
               [this, reduction, pieces = c10::SmallVector<Piece, 2>(pieces.begin(), pieces.end())](const Launch& start) {
                 const auto complete = pieces.empty() ? reduction : resolved(reduction, pieces.front().whole);
                 return transport_->reduce_scatter(pieces, complete, start);
               });
}

Work Group::all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Call& call) {
  const auto fill = [&](Envelope& envelope) {
    describe(envelope, tensor, traits());
    const auto complete = resolved(reduction, tensor);
    describe(envelope, complete);
    expect_reducible(complete, tensor.scalar_type());
  };
  return start(Operation::AllReduce, call, fill, [this, reduction, tensor](const Launch& start) {
    return transport_->all_reduce(tensor, resolved(reduction, tensor), start);
  });
}

Work Group::broadcast(const at::Tensor& tensor, int root, const Call& call) {
  const auto fill = [&](Envelope& envelope) {
    describe(envelope, tensor, traits());
    if (root < 0 || root >= size()) throw UsageError("rank {} does not exist in a group of {}", root, size());
    envelope.root = traits().world_ranks[static_cast<size_t>(root)];
  };
  return start(Operation::Broadcast, call, fill,
               [this, tensor, root](const Launch& start) { return transport_->broadcast(tensor, root, start); });
}

Work Group::barrier(const Call& call) {
  return start(Operation::Barrier, call, {}, [](const Launch&) { return Moved(); });
}

Work Group::meet(const Call& call) {
  if (!link_) return barrier(call);
  note_caller();
  meetings_++;
  return queue_.run([this, envelope = envelope_for(Operation::Barrier, call), limit = call.limit] {
    const auto end = c10::make_scope_exit([&] { meetings_--; });
    for (;;) {
      try {
        return run(envelope, {}, limit, [](const Launch&) { return Moved(); });
      } catch (const DisagreementError&) {  // a rank was in another operation, and has got this error there
      } catch (const UsageError&) {         // or could not take part in one
      }
    }
  });
}

Extremes Group::extremes(uint64_t own, const Call& call) {
  auto found = Extremes::of(own);
  start(
      Operation::Compare, call, {},
      [&, this](const Launch&) {
        if (link_) found = known_;
        return Moved();
      },
      own)
      .wait();
  return found;
}

std::vector<std::string> Group::texts(const std::string& own, const Call& call) {
  std::vector<std::string> found(static_cast<size_t>(size()), own);
  start(Operation::Texts, call, {}, [&, this](const Launch& start) {
    if (link_) found = all_gather_texts(*link_, own, start.end);
    return Moved();
  }).wait();
  return found;
}

std::shared_ptr<Group> Group::split(std::span<const int> colors, const Call& call) {
  const auto fill = [&](Envelope& envelope) {
    for (const int color : colors) mix_into_layout(envelope, color);
    if (static_cast<int>(colors.size()) != size()) {
      throw UsageError("{} colors for {} ranks; give one for each", colors.size(), size());
    }
  };
  std::shared_ptr<Link> link;
  std::unique_ptr<Transport> transport;
  uint64_t number = 0;
  start(Operation::Split, call, fill, [&, this](const Launch& start) {
    if (link_) {
      number = number_of_part(number_, now_.sequence, colors[static_cast<size_t>(rank())]);
      link = link_->split(members_of(colors, rank()), start.end);
    }
    transport = transport_->split(colors, link, start);
    return Moved();
  }).wait();
  // Not make_shared: the constructor that takes a number is private.
  return std::shared_ptr<Group>(new Group(std::move(transport), std::move(link), family_, number));
}

std::shared_ptr<Group> Group::part(std::span<const int> colors, const Call& call) {
  std::vector<int> division;
  for (const int color : colors) division.push_back(static_cast<int>(std::ranges::find(colors, color) - colors.begin()));
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = parts_.find(division); known != parts_.end()) return known->second;
  }
  auto made = split(colors, call);
  const std::lock_guard lock(mutex_);
  return parts_.emplace(std::move(division), std::move(made)).first->second;
}

std::vector<std::shared_ptr<Group>> Group::parts() const {
  const std::lock_guard lock(mutex_);
  const auto known = std::views::values(parts_);
  return {known.begin(), known.end()};
}

SharedAttempt Group::share(const AreaShape& shape, const Call& call) {
  const auto refuse = [&](std::string_view why) {
    return SharedAttempt{.area = nullptr, .why_not = fmt::format("transport {}: {}", traits().name, why)};
  };
  if (!link_ || !traits().device.is_cpu()) return refuse("it shares no memory");
  if (const int hosts = traits().topology.hosts(); hosts > 1) return refuse(fmt::format("the ranks are on {} hosts", hosts));
  const auto fill = [&](Envelope& envelope) {
    envelope.numel = static_cast<int64_t>(shape.bytes_per_rank);
    envelope.pieces = shape.counters;
  };
  SharedAttempt attempt;
  start(Operation::Share, call, fill, [&, this](const Launch& start) {
    attempt = link_->share(shape, start.end);
    return Moved();
  }).wait();
  if (!attempt.area) return refuse(attempt.why_not);
  attempt.area->when_broken([family = family_, own = world_rank()](const LinkFailure& failure, std::string_view message) {
    const int culprit = record_culprit(failure, own);
    if (failure.kind == LinkFailure::Kind::Late) family->report(kLateRanks, message);
    if (failure.kind != LinkFailure::Kind::Aborted) family->abort(fmt::format("rank {}: {}", own, message), culprit);
  });
  return attempt;
}

void Group::abort(std::string_view reason) noexcept {
  if (!link_) return;  // there is nobody who waits
  try {
    family_->abort(fmt::format("rank {}: {}", world_rank(), reason), world_rank());
  } catch (const std::exception&) {  // out of memory: the other ranks wait until their time limit
  }
}

void Group::note_caller() {
  callers_.note();
  link_->used_by_this_thread();
}

Work Group::start(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill, Run run, std::optional<uint64_t> known) {
  if (!link_) {
    expect_fitting(operation, call, fill);
    auto moved = run({.unit = call.subject.unit, .inputs = Event::later(traits().device)});
    count(operation, moved.bytes);
    return moved.ready.passed() ? Work() : Work(std::make_shared<Queued>(std::move(moved.ready)));
  }
  note_caller();
  return queue_.run([this, envelope = envelope_for(operation, call, fill), inputs = Event::record(traits().device), limit = call.limit,
                     run = std::move(run), known] { return this->run(envelope, inputs, limit, run, known); });
}

Event Group::run(Envelope envelope, Event inputs, std::chrono::milliseconds limit, const Run& run, std::optional<uint64_t> known) {
  // Transfers need no autograd and no version counters, and the buffers may be inference tensors, which only this mode may write.
  const c10::InferenceMode inference;
  watch_device();
  if (broken_) std::rethrow_exception(broken_);
  envelope.sequence = sequence_++;
  now_ = envelope;
  const Launch start{.unit = now_.unit.view(), .inputs = std::move(inputs), .end = Clock::now() + limit};
  const auto recorded = family_->recorder().begin(number_, envelope);
  auto outcome = FlightRecorder::Outcome::Failed;
  const auto record = c10::make_scope_exit([&] { family_->recorder().end(recorded, outcome); });
  try {
    agree(envelope, known, start.end);
    record_recovery(world_rank());  // this rank has survived whatever has failed before
    auto ready = run_agreed(envelope, start, run);
    outcome = FlightRecorder::Outcome::Done;
    if (!ready.passed()) under_way_.push_back({.ready = ready, .envelope = envelope, .limit = limit, .end = start.end});
    return ready;
  } catch (const LinkFailure& failure) {
    fail(failure, envelope, limit);
  } catch (const DisagreementError& error) {
    // Ranks come to tessera::recover from different points of their programs.
    if (std::ranges::none_of(envelopes_, &Envelope::recovers)) {
      family_->report(fmt::format("{:x}-{}", number_, envelope.sequence), error.what());
    }
    throw;
  }
}

bool Group::watch_device() try {
  while (!under_way_.empty() && under_way_.front().ready.passed()) {
    under_way_.pop_front();
    // The time of an operation begins when the one before it has ended, because work that the program had queued before does not count.
    if (!under_way_.empty()) under_way_.front().end = std::max(under_way_.front().end, Clock::now() + under_way_.front().limit);
  }
  if (under_way_.empty()) return false;
  const auto& oldest = under_way_.front();
  if (Clock::now() < oldest.end) return true;
  // All ranks have agreed about it, so either a device hangs, or a rank has ended since.
  try {
    fail(others_are_late(*link_), oldest.envelope, oldest.limit);
  } catch (const std::exception& error) {
    log(LogLevel::Error, error.what());  // a wait on the device gets no error, and the next operation may be far
  }
  under_way_.clear();
  return false;
} catch (const std::exception& error) {  // the device has failed
  under_way_.clear();
  const auto message = fmt::format("rank {}: its device has failed: {}", world_rank(), first_line(error));
  broken_ = std::make_exception_ptr(CommError(message));
  log(LogLevel::Error, message);
  family_->abort(message, world_rank());
  return false;
}

void Group::agree(const Envelope& envelope, std::optional<uint64_t> known, Clock::time_point deadline) {
  auto digest = envelope.digest();
  if (known) digest.known = Extremes::of(*known);
  link_->combine(digest, deadline);
  known_ = digest.known;
  if (known ? digest.what.are_one() : digest.agrees()) return;
  // All ranks see the same digest, so all come here.
  envelopes_ = all_gather_values(*link_, envelope, deadline);
  expect_agreement(envelopes_, traits().world_ranks, callers_.callers());
}

Event Group::run_agreed(const Envelope& envelope, const Launch& start, const Run& run) {
  try {
    auto moved = run(start);
    count(envelope.operation, moved.bytes);
    last_ = envelope;
    return std::move(moved.ready);
  } catch (const std::exception& error) {
    // After agreement the other ranks wait for this one, so they must be told.
    const auto message =
        fmt::format("operation {} of rank {}, {}, failed: {}", envelope.sequence, world_rank(), envelope.describe(), first_line(error));
    broken_ = std::make_exception_ptr(CommError(message));
    family_->abort(message, world_rank());
    std::rethrow_exception(broken_);
  }
}

void Group::fail(LinkFailure failure, const Envelope& envelope, std::chrono::milliseconds limit) {
  if (failure.is_guess) {
    auto missing = family_->missing(kLateRanks, number_, envelope.sequence, traits().world_ranks);
    if (!missing.empty()) failure.ranks = std::move(missing);
  }
  const auto what = fmt::format("operation {} of rank {}, {}", envelope.sequence, world_rank(), envelope.describe());
  // Every operation begins with an exchange among all ranks, so the failed ranks came at least to the last operation that finished here.
  const auto before =
      last_ ? fmt::format("the last that {} came to was operation {}, {}", name_ranks(failure.ranks), last_->sequence, last_->describe())
            : fmt::format("it is the first of this group");
  const int culprit = record_culprit(failure, world_rank());
  switch (failure.kind) {
    case LinkFailure::Kind::Late: {
      const auto message = fmt::format("{}, waited {} s for {} and gave up; {}{}", what, std::chrono::duration<double>(limit).count(),
                                       name_ranks(failure.ranks), before, envelope.call.empty() ? "" : envelope.advice_if_alone());
      broken_ = std::make_exception_ptr(TimeoutError(message));
      family_->report(kLateRanks, message);
      family_->abort(message, culprit);
      break;
    }
    case LinkFailure::Kind::Gone: {
      const auto advice = failure.reason.ends_with("has died") ? std::string() : envelope.advice_if_alone();
      const auto message = fmt::format("{}, can't finish: {} {}; {}{}", what, name_ranks(failure.ranks), failure.reason, before, advice);
      broken_ = std::make_exception_ptr(CommError(message));
      family_->abort(message, culprit);
      break;
    }
    case LinkFailure::Kind::Deadlocked:
    case LinkFailure::Kind::Aborted:
      family_->end_transports(failure.reason);
      broken_ = std::make_exception_ptr(CommError("{}, was broken off: {}", what, failure.reason));
      break;
  }
  std::rethrow_exception(broken_);
}

Traffic Group::traffic(Operation operation) const {
  const auto& counter = counters_[static_cast<size_t>(operation)];
  return {.calls = counter.calls, .bytes = counter.bytes};
}

void Group::reset_traffic() {
  for (auto& counter : counters_) counter.calls = counter.bytes = 0;
}

void Group::count(Operation operation, uint64_t bytes) {
  auto& counter = counters_[static_cast<size_t>(operation)];
  counter.calls += 1;
  counter.bytes += bytes;
}

}  // namespace tessera
