// Makes c10d's gloo backend and a link over it, for ranks that share no memory.
#pragma once

#include "tessera/comm/engine.h"

namespace tessera {

std::string why_no_gloo();
/// Throws CommError if the ranks can't be connected in time. GLOO_SOCKET_IFNAME names the network interface; without it, it is the one by
/// which this host reaches the meeting point.
Connection connect_gloo(const Meeting& meeting);

}  // namespace tessera
