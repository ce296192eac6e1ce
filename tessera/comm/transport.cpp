#include "tessera/comm/transport.h"

#include <functional>
#include <thread>

#include "tessera/base/error.h"
#include "tessera/shard/unit/gradient_slots.h"

namespace tessera {

std::string_view name(Operation operation) {
  static constexpr std::string_view kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "split", "share"};
  return kNames[static_cast<size_t>(operation)];
}

std::string_view name(Reduce op) {
  static constexpr std::string_view kNames[] = {"sum", "mean", "min", "max"};
  return kNames[static_cast<size_t>(op)];
}

Transport::Transport(Traits traits) : traits_(std::move(traits)), slots_(std::make_unique<GradientSlots>(*this)) {}

Transport::~Transport() = default;

SharedAttempt Transport::share(const AreaShape& /*shape*/, const Call& /*call*/) {
  return {.area = nullptr, .why_not = "transport " + traits_.name + " shares no memory"};
}

void Transport::called_by_this_thread() {
  const auto id = std::hash<std::thread::id>()(std::this_thread::get_id());
  size_t first = 0;
  if (!thread_.compare_exchange_strong(first, id) && first != id) several_threads_ = true;
}

void Transport::expect_agreement(std::span<const Envelope> envelopes) const {
  try {
    tessera::expect_agreement(envelopes);
  } catch (const DisagreementError& error) {
    if (!several_threads_) throw;
    throw DisagreementError(
        std::string(error.what()) +
        "; several threads of this rank have called the group: if they do so at the same time, each needs one of its own, made in the same "
        "order on every rank, by world.duplicate()");
  }
}

Traffic Transport::traffic(Operation operation) const {
  const auto& counter = counters_[static_cast<size_t>(operation)];
  return {.calls = counter.calls, .bytes = counter.bytes};
}

void Transport::reset_traffic() {
  for (auto& counter : counters_) counter.calls = counter.bytes = 0;
}

void Transport::count(Operation operation, uint64_t bytes) {
  auto& counter = counters_[static_cast<size_t>(operation)];
  counter.calls += 1;
  counter.bytes += bytes;
}

}  // namespace tessera
