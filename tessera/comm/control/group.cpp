#include "tessera/comm/control/group.h"

#include <c10/core/InferenceMode.h>
#include <c10/util/ScopeExit.h>
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/launch_record.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/comm/control/fill_envelope.h"
#include "tessera/comm/host/shared_area.h"

namespace tessera {
namespace {

// How long the destructor waits for operations that were started and not waited for.
constexpr auto kFarewell = std::chrono::seconds(10);

/// The Work of an operation that ran in the caller's thread, and may have queued work on a device.
struct Queued final : Work::State {
  explicit Queued(Event ready) : ready(std::move(ready)) {}
  void wait() override {}
  bool done() const override { return true; }
  Event ready_event() const override { return ready; }
  const Event ready;
};

/// The Work of an operation of a dry run, which ends at a time of the simulation's clock.
struct Simulated final : Work::State {
  Simulated(Simulation& simulation, double end) : simulation(simulation), end(end) {}
  void wait() override { simulation.wait_until(end); }
  bool done() const override { return simulation.has_come(end); }
  Simulation& simulation;
  const double end;
};

}  // namespace

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

Envelope Group::describe(Operation operation, const Subject& subject, c10::function_ref<void(Envelope&)> fill) const {
  return envelope_for(operation, subject, fill, /*is_alone=*/!link_);
}

SharedAttempt Group::share(const AreaShape& shape, const Subject& subject, std::chrono::milliseconds limit) {
  const auto refuse = [&](std::string_view why) {
    return SharedAttempt{.why_not = fmt::format("transport {}: {}", traits().name, why)};
  };
  if (!link_ || !traits().device.is_cpu()) return refuse("it shares no memory");
  const int hosts = traits().topology.hosts();
  const bool over_levels = shape.among == Among::Host && traits().levels > 1;
  if (hosts > 1 && !over_levels) {
    const bool could_share = shape.among == Among::Host && hosts < traits().size;
    return refuse(fmt::format("the ranks are on {} hosts{}", hosts,
                              could_share ? ", and send at one level (TESSERA_LEVELS=1, or a host whose ranks can't share memory)" : ""));
  }
  const auto envelope = describe(Operation::Share, subject, [&](Envelope& own) {
    own.numel = static_cast<int64_t>(shape.bytes_per_rank);
    own.pieces = shape.counters;
    own.mix_into_layout(static_cast<int64_t>(shape.among));
  });
  SharedAttempt attempt;
  start(envelope, limit, [&, this](const Launch& launch) {
    attempt = link_->share(shape, launch.end);
    return Moved();
  }).wait();
  if (!attempt.area) return refuse(attempt.why_not);
  attempt.area->when_broken([family = family_, own = world_rank()](const LinkFailure& failure, std::string_view message) {
    family->tell(failure, own, fmt::format("rank {}: {}", own, message));
  });
  return attempt;
}

void Group::note_caller() {
  callers_.note();
  link_->used_by_this_thread();
}

Work Group::run_here(const Envelope& envelope, Run act) {
  auto moved = act({.unit = envelope.unit.view(), .inputs = Event::later(traits().device)});
  count(envelope.operation, moved);
  return moved.ready.passed() ? Work() : Work(std::make_shared<Queued>(std::move(moved.ready)));
}

Work Group::simulate(Simulation& simulation, const Envelope& envelope, std::chrono::milliseconds limit, Run act,
                     std::optional<uint64_t> known) {
  simulation.begin_operation();
  double end = 0;
  {
    const auto leave = c10::make_scope_exit([&] { end = simulation.end_operation(); });
    run(envelope, {}, limit, act, known);
  }
  return Work(std::make_shared<Simulated>(simulation, end));
}

Event Group::run(Envelope envelope, Event inputs, std::chrono::milliseconds limit, Run act, std::optional<uint64_t> known) {
  // Transfers need no autograd and no version counters, and the buffers may be inference tensors, which only this mode may write.
  const c10::InferenceMode inference;
  watch_device();
  if (broken_) std::rethrow_exception(broken_);
  envelope.sequence = sequence_++;
  now_ = envelope;
  const Launch start{.unit = now_.unit.view(), .inputs = std::move(inputs), .end = Clock::now() + limit};
  const auto recorded = family_->record()->begin(number_, envelope);
  auto outcome = Record::Outcome::Failed;
  const auto record = c10::make_scope_exit([&] { family_->record()->end(recorded, outcome); });
  try {
    agree(envelope, known, start.end);
    record_recovery(world_rank());  // this rank has survived all earlier failures
    auto ready = run_agreed(envelope, start, act);
    outcome = Record::Outcome::Done;
    if (!ready.passed()) under_way_.push_back({.ready = ready, .envelope = envelope, .limit = limit, .end = start.end});
    return ready;
  } catch (const LinkFailure& failure) {
    fail(failure, envelope, limit);
  } catch (const DisagreementError& error) {
    // A disagreement with tessera::recover is expected: ranks enter it from different points of their programs.
    if (std::ranges::none_of(envelopes_, &Envelope::recovers)) {
      family_->report(fmt::format("{:x}-{}", number_, envelope.sequence), error.what());
    }
    throw;
  }
}

bool Group::watch_device() try {
  while (!under_way_.empty() && under_way_.front().ready.passed()) {
    under_way_.pop_front();
    // The time of an operation begins when the operation before it has ended: work that the program had queued before does not count.
    if (!under_way_.empty()) under_way_.front().end = std::max(under_way_.front().end, Clock::now() + under_way_.front().limit);
  }
  if (under_way_.empty()) return false;
  const auto& oldest = under_way_.front();
  if (Clock::now() < oldest.end) return true;
  // All ranks have agreed about the operation, so either a device hangs, or a rank has ended since.
  try {
    fail(others_are_late(*link_), oldest.envelope, oldest.limit);
  } catch (const std::exception& error) {
    log(LogLevel::Error, error.what());  // waits on the device do not throw it, and the next operation may come late
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
  // All ranks see the same digest, so all of them exchange envelopes.
  envelopes_ = all_gather_values(*link_, envelope, deadline);
  expect_agreement(envelopes_, traits().world_ranks, callers_.callers());
}

Event Group::run_agreed(const Envelope& envelope, const Launch& start, Run act) {
  try {
    auto moved = act(start);
    count(envelope.operation, moved);
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
    auto missing = family_->missing(number_, envelope.sequence, traits().world_ranks);
    if (!missing.empty()) failure.ranks = std::move(missing);
  }
  const auto what = fmt::format("operation {} of rank {}, {}", envelope.sequence, world_rank(), envelope.describe());
  // Every operation begins with an exchange among all ranks, so the failed ranks came at least to the last operation that finished here.
  const auto before =
      last_ ? fmt::format("the last operation that {} reached was {}, {}", name_ranks(failure.ranks), last_->sequence, last_->describe())
            : fmt::format("it is the first operation of this group");
  const bool advises = failure.kind == LinkFailure::Kind::Late ? !envelope.call.empty() : !failure.reason.ends_with("has died");
  broken_ = error_of(failure, what, limit, fmt::format("; {}{}", before, advises ? envelope.advice_if_alone() : ""));
  family_->tell(failure, world_rank(), message_of(broken_));
  std::rethrow_exception(broken_);
}

void Group::count(Operation operation, const Moved& moved) {
  auto& counter = counters_[static_cast<size_t>(operation)];
  counter.calls += 1;
  counter.bytes += moved.bytes;
  counter.across += moved.across;
}

}  // namespace tessera
