// Looks up the addresses of a host.
#pragma once

#include <netdb.h>

#include <memory>
#include <string>

namespace tessera {

struct Addresses {
  int code = 0;                               // of getaddrinfo(); 0 if all is well
  std::shared_ptr<addrinfo> first = nullptr;  // a list
};

/// Null for `host` means all addresses of this host. May take long: name servers answer when they like.
Addresses addresses_of(const char* host, int port, int kind_of_socket);

}  // namespace tessera
