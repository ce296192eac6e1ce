#include "tessera/comm/host/addresses.h"

namespace tessera {

Addresses addresses_of(const char* host, int port, int kind_of_socket) {
  addrinfo hints{};
  hints.ai_socktype = kind_of_socket;
  hints.ai_flags = AI_PASSIVE;
  addrinfo* found = nullptr;
  const int code = ::getaddrinfo(host, std::to_string(port).c_str(), &hints, &found);
  if (code != 0) return {.code = code};
  return {.first = std::shared_ptr<addrinfo>(found, &::freeaddrinfo)};
}

}  // namespace tessera
