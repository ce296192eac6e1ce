#include "tessera/comm/transport.h"

#include <algorithm>
#include <numeric>
#include <ranges>

namespace tessera {

std::string_view name(Operation operation) {
  static constexpr std::string_view kNames[] = {"all_gather", "reduce_scatter", "all_reduce", "broadcast", "barrier", "split", "share"};
  return kNames[static_cast<size_t>(operation)];
}

std::string_view name(Reduce op) {
  static constexpr std::string_view kNames[] = {"sum", "mean", "min", "max"};
  return kNames[static_cast<size_t>(op)];
}

namespace {

Transport::Traits with_world_ranks(Transport::Traits traits) {
  if (!traits.world_ranks.empty()) return traits;
  traits.world_ranks.resize(static_cast<size_t>(traits.size));
  std::iota(traits.world_ranks.begin(), traits.world_ranks.end(), 0);
  return traits;
}

}  // namespace

Transport::Transport(Traits traits) : traits_(with_world_ranks(std::move(traits))) {}

Transport::~Transport() = default;

std::shared_ptr<Transport> Transport::part(std::span<const int> colors, const Call& call) {
  std::vector<int> division;
  for (const int color : colors) division.push_back(static_cast<int>(std::ranges::find(colors, color) - colors.begin()));
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = parts_.find(division); known != parts_.end()) return known->second;
  }
  std::shared_ptr<Transport> made = split(colors, call);
  const std::lock_guard lock(mutex_);
  return parts_.emplace(std::move(division), std::move(made)).first->second;
}

std::vector<std::shared_ptr<Transport>> Transport::parts() const {
  const std::lock_guard lock(mutex_);
  const auto known = std::views::values(parts_);
  return {known.begin(), known.end()};
}

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
