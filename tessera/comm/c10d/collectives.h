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

/// Works with the backend of any vendor, because it uses libtorch's streams and events. The backend adds values in the dtype in which they
/// are sent and in an order of its own.
///
/// On a device, operations run on a stream of this transport, after the work that makes their inputs. The host does not wait for them. The
/// allocator is told which memory they use, and does not reuse it before they have ended.
class CollectivesTransport final : public Transport {
 public:
  /// Collective: makes the backend of the ranks of a link. `name` is the same on all of them, and no other group has it.
  using MakeBackend = std::function<BackendPtr(const std::string& name, Link& part)>;

  /// Takes the ranks from the link.
  CollectivesTransport(GroupTraits traits, std::shared_ptr<Link> link, BackendPtr backend, MakeBackend make);

  Moved run(const Request& request, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override;
  void abort(std::string_view reason) noexcept override;

 private:
  /// Returns how many bytes it sent.
  uint64_t move(const Request& request, const Piece& piece, const Launch& start);
  /// Waits for the collective that `begin` starts; on a device, only work that is queued later waits. If the collective fails, asks the
  /// link which rank is gone, late or has given up, because a backend's errors name sockets and not ranks. On a device, a missing rank
  /// causes no failure here.
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
