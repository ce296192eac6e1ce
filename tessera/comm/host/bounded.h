// Time limits: how much time is left of a limit, and a limit around a call that may never return.
#pragma once

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace tessera {

/// The time until `end`, but at least a millisecond, because for some calls 0 means no limit.
inline std::chrono::milliseconds time_until(std::chrono::steady_clock::time_point end) {
  return std::max(std::chrono::ceil<std::chrono::milliseconds>(end - std::chrono::steady_clock::now()), std::chrono::milliseconds(1));
}

/// Returns the result of `call`, or nothing if it has not returned within the limit. For stores, which answer over a socket from a host
/// that may be frozen or cut off. The call runs in a thread of its own and continues after the limit, so it must own everything that it
/// uses. An exception that it throws within the limit is thrown here.
template <class Call>
auto bounded(std::chrono::milliseconds limit, Call call) -> std::optional<decltype(call())> {
  auto task = std::make_shared<std::packaged_task<decltype(call())()>>(std::move(call));
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace tessera
