// Makes c10d's gloo backend and a link over it, for ranks that share no memory.
#pragma once

#include <c10/util/intrusive_ptr.h>

#include <chrono>
#include <memory>
#include <string>

#include "tessera/comm/host/link.h"

namespace c10d {
class Store;
}  // namespace c10d

namespace tessera {

struct GlooOptions {
  /// The address of this host as other hosts reach it. GLOO_SOCKET_IFNAME takes precedence; without either, c10d chooses.
  std::string address = {};
  std::chrono::milliseconds start_limit = std::chrono::minutes(5);
};

/// Collective: connects the ranks. `store` must be this group's own (a PrefixStore). Throws CommError if they can't be connected in time.
std::unique_ptr<Link> gloo_link(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const GlooOptions& options = {});

}  // namespace tessera
