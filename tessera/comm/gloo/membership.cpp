#include "tessera/comm/gloo/membership.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <fmt/format.h>
#include <linux/filter.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/secret.h"
#include "tessera/comm/backend/backend_hub.h"
#include "tessera/comm/host/addresses.h"
#include "tessera/comm/host/bounded.h"

namespace tessera {
namespace {

constexpr int kProofTag = 0;
constexpr auto kProofLimit = std::chrono::seconds(60);  // counts from when all ranks are connected

/// Published by each rank in the store, which only ranks can use.
struct Challenge {
  std::string number;  // used only once, so that no proof serves twice
  std::string host;
};

std::vector<Challenge> exchange_challenges(const StorePtr& store, const Identity& own, Clock::time_point end) {
  const auto host = host_id();
  std::vector<Challenge> challenges;
  for (const auto& text : exchange(store, own, "challenge", random_secret() + host.substr(0, host.find('/')), {.end = end})) {
    const auto digits = random_secret().size();
    if (text.size() < digits) throw CommError("a rank has published '{}' in the store, which is not a challenge", text);
    challenges.push_back({.number = text.substr(0, digits), .host = text.substr(digits)});
  }
  return challenges;
}

}  // namespace

void prove_membership(c10d::Backend& backend, const StorePtr& store, Clock::time_point end) {
  const Identity own{.rank = backend.getRank(), .world_size = backend.getSize()};
  const auto secret = given_secret().value_or("");
  const auto challenges = exchange_challenges(store, own, end);
  end = std::min(end, Clock::now() + kProofLimit);
  const auto proof = [&](int from, int to) {
    return proof_of(secret, {"gloo", challenges[to].number, std::to_string(from), std::to_string(to)});
  };
  const auto refuse = [&](int peer, const std::string& why) {
    return CommError(
        "rank {}: the connection that should lead to rank {} on host {} leads to a process that {}: it is none of this job, or its "
        "TESSERA_SECRET is another one",
        own.rank, peer, challenges[peer].host, why);
  };
  struct Talk {
    int peer;
    std::string sent;
    at::Tensor received = at::empty({kProofBytes}, at::kByte);
    BackendWork receive = nullptr, send = nullptr;
  };
  std::vector<Talk> talks;
  for (int peer = 0; peer < own.world_size; peer++) {
    if (peer != own.rank) talks.push_back({.peer = peer, .sent = proof(own.rank, peer)});
  }
  int peer = own.rank;  // the peer that the current call concerns
  try {
    for (auto& talk : talks) {
      peer = talk.peer;
      std::vector<at::Tensor> target = {talk.received}, source = {at::from_blob(talk.sent.data(), {kProofBytes}, at::kByte)};
      talk.receive = backend.recv(target, peer, kProofTag);
      talk.send = backend.send(source, peer, kProofTag);
    }
    for (auto& talk : talks) {
      peer = talk.peer;
      talk.receive->wait(time_until(end));
      if (!same_proof({static_cast<const char*>(talk.received.data_ptr()), kProofBytes}, proof(peer, own.rank))) {
        throw refuse(peer, "does not know the secret");
      }
    }
    for (auto& talk : talks) {
      peer = talk.peer;
      talk.send->wait(time_until(end));
    }
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    throw refuse(peer, fmt::format("has not shown that it knows the secret ({})", backend_error_text(error)));
  }
}

std::set<int> listening_sockets() {
  std::set<int> found;
  for (const int fd : open_descriptors()) {
    const auto get = [fd](int option) {
      int value = 0;
      socklen_t length = sizeof value;
      return ::getsockopt(fd, SOL_SOCKET, option, &value, &length) == 0 ? value : 0;
    };
    const int domain = get(SO_DOMAIN);
    if (get(SO_ACCEPTCONN) == 1 && (domain == AF_INET || domain == AF_INET6)) found.insert(fd);
  }
  return found;
}

void deafen(int listener) {
  sock_filter drop = BPF_STMT(BPF_RET | BPF_K, 0);
  const sock_fprog program{.len = 1, .filter = &drop};
  if (::setsockopt(listener, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof program) != 0) {
    log(LogLevel::Debug, "gloo still accepts connections at its port: {}", std::strerror(errno));
  }
}

}  // namespace tessera
