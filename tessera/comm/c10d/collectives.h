// Moves data by the collectives of a c10d backend, such as NCCL's, on the backend's device, while the device computes.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "tessera/comm/device/device_queue.h"
#include "tessera/comm/transport.h"

namespace c10d {
class Backend;
}  // namespace c10d

namespace tessera {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;

/// Knows nothing of the vendor: streams and events are libtorch's, for any device. Sums are the backend's, in the dtype in which values are
/// sent and in an order of its own.
///
/// On a device, operations are queued on a stream of this transport, behind the inputs of the caller. Nothing waits for them on the host.
/// Memory that they use is noted with its allocator, which does not hand it out again before they have ended.
class CollectivesTransport final : public Transport {
 public:
  /// Collective: makes the backend of a part of the ranks. `name` is the same on all of them, and no other group has it.
  using MakeBackend = std::function<BackendPtr(const std::string& name, int rank, int size)>;

  /// The ranks come from the link.
  CollectivesTransport(GroupTraits traits, std::shared_ptr<Link> link, BackendPtr backend, MakeBackend make);

  Moved run(const Request& request, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override;
  void abort(std::string_view reason) noexcept override;

 private:
  /// Returns how many bytes it sent.
  uint64_t move(const Request& request, const Piece& piece, const Launch& start);
  /// Waits for the collective of the backend that `begin` returns; on a device, only work that is queued later waits. If it fails, the link
  /// says which rank is gone, late or has given up, because backends name sockets and not ranks. On a device, a rank that does not come
  /// makes nothing fail here.
  template <class Begin>
  void collective(const Launch& start, const Begin& begin) const;

  const std::shared_ptr<Link> link_;
  const BackendPtr backend_;
  const MakeBackend make_;
  std::optional<DeviceQueue> queue_;  // unset on the host
  std::string name_;
  int parts_ = 0;
};

}  // namespace tessera
