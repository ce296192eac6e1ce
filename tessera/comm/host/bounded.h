// A call with an end, around one that may never return.
#pragma once

#include <chrono>
#include <future>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

namespace tessera {

/// What `call` returns, or nothing if it has not returned by then: a store answers over a socket, and its host may be frozen or cut off.
/// The call then goes on in a thread of its own, so it must own everything that it uses. Its exceptions come out here.
template <class Call>
auto bounded(std::chrono::milliseconds limit, Call call) -> std::optional<decltype(call())> {
  auto task = std::make_shared<std::packaged_task<decltype(call())()>>(std::move(call));
  auto result = task->get_future();
  std::thread([task] { (*task)(); }).detach();
  if (result.wait_for(limit) != std::future_status::ready) return std::nullopt;
  return result.get();
}

}  // namespace tessera
