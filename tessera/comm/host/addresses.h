// Looks up the addresses of a host, within a time limit, sets options of connections, and finds a process's descriptors.
#pragma once

#include <netdb.h>
#include <sys/socket.h>

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

/// A list of addresses, or why there is none.
struct Addresses {
  std::shared_ptr<addrinfo> first = nullptr;
  std::string why_not = {};
};

/// `kind_of_socket` is SOCK_STREAM or SOCK_DGRAM. Gives up at `end`, because a name server may take long to answer.
Addresses addresses_of(const std::string& host, int port, int kind_of_socket, std::chrono::steady_clock::time_point end);

/// "10.0.0.1"; empty if it has no such form.
std::string numeric_address(const sockaddr* address, socklen_t length);
/// The numeric address of one end of a socket, ::getsockname or ::getpeername; empty if it has none.
using EndOfSocket = int (*)(int socket, sockaddr* address, socklen_t* length);
std::string address_at(int socket, EndOfSocket end);

/// How long another host may be silent: TESSERA_SILENCE_LIMIT, or else 30 s. Nothing if it is 0. The first call may throw ConfigError.
std::optional<std::chrono::seconds> silence_limit();
/// Makes the kernel ask the other host now and then whether it still has this connection, also while there is nothing to send.
void keep_asking(int socket, std::chrono::seconds limit);

/// Sets options of a connection, so that small messages are sent at once, and the kernel ends it if the other host is silent for as long as
/// silence_limit().
void set_options(int socket);

/// All addresses of this host, to listen at.
std::shared_ptr<addrinfo> own_addresses(int port);

/// The open descriptors of this process, sockets and others, some more than once.
std::vector<int> open_descriptors();

}  // namespace tessera
