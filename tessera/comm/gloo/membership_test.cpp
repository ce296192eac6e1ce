// A process that takes the place of a rank in gloo's connections is found out, and gloo listens to nobody once its ranks are connected.
#include "tessera/comm/gloo/membership.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <future>
#include <thread>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "tessera/base/error.h"
#include "tessera/base/fd.h"
#include "tessera/comm/gloo/gloo_link.h"
#include "tests/testing/transports.h"

namespace tessera::testing::membership_test {
namespace {

using namespace std::chrono_literals;
using ::testing::HasSubstr;

/// Two ranks of this process. gloo has the rank with the higher address connect to the other one, which listens.
struct TwoRanks {
  StorePtr store = c10::make_intrusive<c10d::HashStore>();
  std::set<int> others = listening_sockets();
  std::chrono::milliseconds limit = kTestLimit;

  std::future<c10::intrusive_ptr<c10d::Backend>> start(int rank) const {
    return std::async(std::launch::async, [=, store = store, limit = limit] {
      return make_gloo(store, rank, 2, rank == 0 ? "127.0.0.1" : "127.0.0.2", limit);
    });
  }

  /// Waits until a rank listens and returns its address.
  sockaddr_in address() const {
    for (;; std::this_thread::sleep_for(1ms)) {
      for (const int socket : listening_sockets()) {
        if (others.contains(socket)) continue;
        sockaddr_in address{};
        socklen_t length = sizeof address;
        ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &length);
        return address;
      }
    }
  }
};

/// Connects as a process that is not a rank. Returns no connection if nobody accepts it within a second.
Fd intruder(const sockaddr_in& address) {
  Fd socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  const timeval limit{.tv_sec = 1, .tv_usec = 0};
  ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDTIMEO, &limit, sizeof limit);
  return ::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0 ? std::move(socket) : Fd();
}

/// Takes the place of rank 1 at rank 0: gloo knows connections by the numbers of the ranks from which they come.
Fd in_place_of_rank_1(const TwoRanks& ranks) {
  auto socket = intruder(ranks.address());
  const ssize_t number = 1;
  EXPECT_EQ(::send(socket.get(), &number, sizeof number, MSG_NOSIGNAL), static_cast<ssize_t>(sizeof number));
  return socket;
}

TEST(Membership, NamesARankWhosePlaceASilentStrangerHasTaken) {
  TwoRanks ranks;
  ranks.limit = 6s;
  auto zero = ranks.start(0);
  const auto silent = in_place_of_rank_1(ranks);
  auto one = ranks.start(1);
  EXPECT_THAT(message_of<CommError>([&] { zero.get(); }), HasSubstr("the connection that should lead to rank 1 on host"));
  EXPECT_THAT(message_of<CommError>([&] { one.get(); }), HasSubstr("the connection that should lead to rank 0 on host"));
}

TEST(Membership, NamesARankWhosePlaceAStrangerHasTakenThatSpeaksGloo) {
  const TwoRanks ranks;
  auto zero = ranks.start(0);
  const auto liar = in_place_of_rank_1(ranks);
  auto one = ranks.start(1);
  std::array<size_t, 6> header{};  // total length, kind, tag, offset, length, offset over there
  constexpr size_t kData = 1, kIsReady = 3;
  while (header[1] != kIsReady)
    ASSERT_EQ(::recv(liar.get(), header.data(), sizeof header, MSG_WAITALL), static_cast<ssize_t>(sizeof header));
  header = {sizeof header + 32, kData, header[2], 0, 32, 0};
  const std::array<char, 32> guess{};
  ::send(liar.get(), header.data(), sizeof header, MSG_NOSIGNAL);
  ::send(liar.get(), guess.data(), guess.size(), MSG_NOSIGNAL);
  EXPECT_THAT(message_of<CommError>([&] { zero.get(); }), HasSubstr("does not know the secret: it is none of this job"));
  EXPECT_THROW(one.get(), CommError);
}

TEST(Membership, ListensToNobodyOnceAllRanksAreThere) {
  const TwoRanks ranks;
  auto zero = ranks.start(0);
  const auto address = ranks.address();
  auto early = intruder(address);
  EXPECT_TRUE(early);
  ::send(early.get(), "GET / HTTP/1.1\r\n\r\n", 18, MSG_NOSIGNAL);
  auto one = ranks.start(1);
  const auto backends = std::array{zero.get(), one.get()};
  EXPECT_FALSE(intruder(address));
}

}  // namespace
}  // namespace tessera::testing::membership_test
