// A link over sockets: point-to-point messages of a c10d backend, gloo's or any other that can send host memory.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "tessera/comm/host/link.h"

namespace c10d {
class Backend;
class Store;
}  // namespace c10d

namespace tessera {

struct GlooOptions {
  /// Address of this host, as others reach it. Empty: what GLOO_SOCKET_IFNAME names, else what c10d chooses.
  std::string address = {};
  std::chrono::milliseconds start_limit = std::chrono::minutes(5);
};

/// Connects the ranks that meet in the store. `store` must be this group's own (a PrefixStore).
std::unique_ptr<Link> gloo_link(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options = {});

/// Uses a backend that exists already. The store, if there is one, lets ranks tell each other why they gave up; it may be null.
std::unique_ptr<Link> backend_link(const c10::intrusive_ptr<c10d::Backend>& backend, const c10::intrusive_ptr<c10d::Store>& store,
                                   std::chrono::milliseconds start_limit);

}  // namespace tessera
