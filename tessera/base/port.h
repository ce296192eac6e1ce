// A port for ranks to meet at.
#pragma once

namespace tessera {

/// One that nobody listens at right now, on this host.
int free_port();

}  // namespace tessera
