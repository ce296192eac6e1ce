#include "tessera/comm/transport.h"


namespace tessera {

std::string_view name(Operation operation) {
  static constexpr std::string_view kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "split", "share"};
  return kNames[static_cast<size_t>(operation)];
}

std::string_view name(Reduce op) {
  static constexpr std::string_view kNames[] = {"sum", "mean", "min", "max"};
  return kNames[static_cast<size_t>(op)];
}

Transport::Transport(Traits traits) : traits_(std::move(traits)) {}

Transport::~Transport() = default;

SharedAttempt Transport::share(const AreaShape& /*shape*/, const Call& /*call*/) {
  return {.area = nullptr, .why_not = "transport " + traits_.name + " shares no memory"};
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
