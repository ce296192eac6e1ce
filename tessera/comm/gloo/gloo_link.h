// Makes c10d's gloo backend and a link over it, for ranks that share no memory.
#pragma once

#include "tessera/comm/engine.h"

namespace c10d {
class Backend;
}

namespace tessera {

std::string why_no_gloo();
/// Throws CommError if the ranks can't be connected in time.
Connection connect_gloo(const Meeting& meeting);

/// The address by which other hosts reach this one: the local address from which this host reaches the meeting point.
std::string gloo_address(const Meeting& meeting);
/// Collective: connects the ranks of a store that nobody else uses. GLOO_SOCKET_IFNAME, if set, names the network interface, and overrides
/// `address`.
c10::intrusive_ptr<c10d::Backend> make_gloo(const StorePtr& store, int rank, int size, const std::string& address,
                                            std::chrono::milliseconds limit);

}  // namespace tessera
