// A link over point-to-point messages of a c10d backend: gloo's, or any other that can send host memory.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>

#include "tessera/comm/host/link.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

class ConnectionWatch;

/// Makes a link over a backend that nobody else uses. A rank that gives up publishes the reason in the store. `connections`, which may be
/// null, watches those of the backend.
std::unique_ptr<Link> own_backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                       std::shared_ptr<ConnectionWatch> connections = nullptr);

/// The same for a backend whose connections stay open when a rank gives up. The link looks for the reason in the store, and then calls the
/// backend's abort().
std::unique_ptr<Link> watched_backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store);

/// Collective: makes a link over a backend that the program uses, too. `store` may be null; then a rank that gives up can't publish the
/// reason.
std::unique_ptr<Link> backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                   std::chrono::milliseconds start_limit);

}  // namespace tessera
