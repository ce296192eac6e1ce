// The transport for host memory over a link whose moves are scripted: the moves it asks for, the results it makes of them, and the errors
// of a link that fails.
#include "tessera/comm/host/host_transport.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <deque>

#include "tessera/base/error.h"
#include "tessera/comm/communicator.h"
#include "tessera/comm/control/group.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"
#include "tests/testing/transports.h"

namespace tessera::testing::host_transport_test {
namespace {

using std::chrono::milliseconds;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// The answer of the link to a move: each other rank sends values, or the link fails.
struct Move {
  std::vector<at::Tensor> arrives = {};  // by rank, of which this rank's own is ignored; if empty, each rank sends what this one sends
  std::optional<LinkFailure> failure = {};
};

/// Rank 1 of three.
class ScriptedLink final : public Link {
 public:
  explicit ScriptedLink(std::deque<Move> script) : script_(std::move(script)) {}

  std::deque<Move> left() const { return script_; }
  std::vector<size_t> sent;  // bytes of each move
  std::string aborted;

  int rank() const override { return 1; }
  std::span<const int> world_ranks() const override { return kWorldRanks; }
  void combine(Digest& /*digest*/, Clock::time_point /*deadline*/) override {}
  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point /*deadline*/) override {
    const auto move = next();
    sent.push_back(own.size());
    copy_own(own, from[1]);
    for (size_t r = 0; r < from.size(); r++) {
      if (r != 1 && !from[r].empty()) copy_own(move.arrives.empty() ? own : bytes_of(move.arrives.at(r)), from[r]);
    }
  }
  void exchange(std::span<const ConstBytes> /*to*/, std::span<const Bytes> /*from*/, Clock::time_point /*deadline*/) override { next(); }
  void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point /*deadline*/) override {
    const auto move = next();
    sent.push_back(to[0].size() + to[2].size());
    // Visits the data in two parts, as does a link with little memory.
    const size_t half = to[1].size() / 2 / sizeof(float) * sizeof(float);
    for (const auto& [begin, size] : {std::pair{size_t{0}, half}, std::pair{half, to[1].size() - half}}) {
      std::vector<ConstBytes> rows;
      for (size_t r = 0; r < to.size(); r++) rows.push_back((r == 1 ? to[1] : bytes_of(move.arrives.at(r))).subspan(begin, size));
      visit(begin, rows);
    }
  }
  std::unique_ptr<Link> split(std::span<const int> /*members*/, Clock::time_point /*deadline*/) override { throw UsageError("no part"); }
  void abort(std::string_view reason, int /*culprit*/) noexcept override { aborted = reason; }

 private:
  static constexpr std::array kWorldRanks = {4, 5, 6};

  Move next() {
    if (script_.empty()) throw std::logic_error("more moves than the script has");
    auto move = std::move(script_.front());
    script_.pop_front();
    if (move.failure) throw *move.failure;
    return move;
  }

  std::deque<Move> script_;
};

struct Scripted {
  explicit Scripted(std::deque<Move> script) : link(std::make_shared<ScriptedLink>(std::move(script))) {}

  const std::shared_ptr<ScriptedLink> link;
  HostTransport transport{{.name = "scripted"}, link};
  const Launch launch{.unit = "layers.3", .end = Clock::now() + kTestLimit};
};

at::Tensor values(std::initializer_list<float> numbers) {
  return at::tensor(std::vector<float>(numbers));
}

Request sum_of(const at::Tensor& tensor, Reduce op) {
  return {.operation = Operation::AllReduce, .pieces = {{.whole = tensor, .own = tensor}}, .reduction = resolved({.op = op}, tensor)};
}

std::vector<float> listed(const at::Tensor& tensor) {
  return {tensor.const_data_ptr<float>(), tensor.const_data_ptr<float>() + tensor.numel()};
}

TEST(HostTransport, TakesItsRanksFromTheLink) {
  const Scripted scripted({});
  EXPECT_EQ(scripted.transport.traits().size, 3);
  EXPECT_THAT(scripted.transport.traits().local_ranks, ElementsAre(1));
  EXPECT_THAT(scripted.transport.traits().world_ranks, ElementsAre(4, 5, 6));
  EXPECT_THAT(message_of<UsageError>([&] { HostTransport({.name = "scripted", .topology = Topology::one_host(2)}, scripted.link); }),
              HasSubstr("hosts are named for 2 ranks, but there are 3"));
}

TEST(HostTransport, GathersEachPieceInOneMove) {
  Scripted scripted({{.arrives = {values({1}), {}, values({3})}}, {.arrives = {values({1, 1}), {}, values({3, 3})}}});
  const Piece one{.whole = at::zeros({3}), .own = values({2})}, two{.whole = at::zeros({6}), .own = values({2, 2})};
  const auto moved = scripted.transport.run({.operation = Operation::AllGather, .pieces = {one, two}}, scripted.launch);
  EXPECT_THAT(listed(one.whole), ElementsAre(1, 2, 3));
  EXPECT_THAT(listed(two.whole), ElementsAre(1, 1, 2, 2, 3, 3));
  EXPECT_EQ(moved.bytes, 2 * (4 + 8));
  EXPECT_TRUE(moved.ready.passed());
  EXPECT_THAT(scripted.link->left(), IsEmpty());
}

TEST(HostTransport, AddsWhatArrivesInPartsAndTheSquaresOfTheResult) {
  Scripted scripted({{.arrives = {values({1, 2, 3}), {}, values({10, 20, 30})}}});
  const Piece piece{.whole = values({0, 0, 0, 100, 200, 300, 0, 0, 0}), .own = at::zeros({3}), .squares = std::make_shared<double>(-1)};
  const auto reduction = resolved({.op = Reduce::Sum}, piece.whole);
  const auto moved =
      scripted.transport.run({.operation = Operation::ReduceScatter, .pieces = {piece}, .reduction = reduction}, scripted.launch);
  EXPECT_THAT(listed(piece.own), ElementsAre(111, 222, 333));
  EXPECT_EQ(*piece.squares, 111. * 111 + 222. * 222 + 333. * 333);
  EXPECT_EQ(moved.bytes, 2 * 3 * sizeof(float));
}

TEST(HostTransport, SendsASmallSumOnceAndALargeOneInTwoMoves) {
  constexpr int64_t kLarge = 3 * 20'000;
  const auto part = at::ones({kLarge / 3});
  Scripted scripted({{.arrives = {values({1}), {}, values({4})}}, {.arrives = {part, {}, part}}, {.arrives = {part * 6, {}, part * 9}}});
  const auto small = values({2}), large = at::ones({kLarge});
  scripted.transport.run(sum_of(small, Reduce::Max), scripted.launch);
  EXPECT_THAT(listed(small), ElementsAre(4));
  scripted.transport.run(sum_of(large, Reduce::Sum), scripted.launch);
  EXPECT_TRUE(at::equal(large, at::cat({part * 6, part * 3, part * 9})));
  EXPECT_THAT(scripted.link->sent, ElementsAre(4, 2 * 80'000, 80'000));
}

TEST(HostTransport, SendsABroadcastFromItsRootAlone) {
  Scripted scripted({{.arrives = {}}, {.arrives = {{}, {}, values({7, 8})}}});
  const auto tensor = values({1, 2});
  const auto broadcast = [&](int root) {
    return scripted.transport.run({.operation = Operation::Broadcast, .pieces = {{.whole = tensor, .own = tensor}}, .root = root},
                                  scripted.launch);
  };
  EXPECT_EQ(broadcast(1).bytes, 2 * 2 * sizeof(float));
  EXPECT_THAT(listed(tensor), ElementsAre(1, 2));
  EXPECT_EQ(broadcast(2).bytes, 0);
  EXPECT_THAT(listed(tensor), ElementsAre(7, 8));
}

TEST(HostTransport, LetsTheFailureOfTheLinkThroughAsItIs) {
  const LinkFailure late{.kind = LinkFailure::Kind::Late, .ranks = {6}};
  Scripted scripted({{.arrives = {values({1}), {}, values({3})}}, {.failure = late}});
  const Piece piece{.whole = at::zeros({3}), .own = values({2})};
  try {
    scripted.transport.run({.operation = Operation::AllGather, .pieces = {piece, piece}}, scripted.launch);
    ADD_FAILURE() << "the second move has failed";
  } catch (const LinkFailure& failure) {
    EXPECT_EQ(failure.kind, LinkFailure::Kind::Late);
    EXPECT_THAT(failure.ranks, ElementsAre(6));
  }
}

/// The error of a gather in which a move fails.
std::string error_of(Move move, const Piece& piece) {
  const auto link = std::make_shared<ScriptedLink>(std::deque{std::move(move)});
  const Communicator world(std::make_shared<Group>(std::make_unique<HostTransport>(GroupTraits{.name = "scripted"}, link), link));
  const auto gather = [&] { world.with_limit(milliseconds(500)).all_gather(std::array{piece}, {.unit = "layers.3"}).wait(); };
  const auto message = message_of<Error>(gather);
  if (!link->aborted.empty()) {
    EXPECT_EQ(message_of<CommError>([&] { world.barrier(); }), message) << "the group can be used no more";
  }
  return message;
}

TEST(HostTransport, FailsInAGroupWithWhatTheLinkSays) {
  const Piece piece{.whole = at::zeros({3}), .own = values({2})};
  EXPECT_THAT(error_of({.failure = LinkFailure{.kind = LinkFailure::Kind::Late, .ranks = {6}}}, piece),
              AllOf(HasSubstr("of rank 5, all_gather of 'layers.3'"), HasSubstr("waited 0.5 s for rank 6 and gave up")));
  EXPECT_THAT(error_of({.failure = LinkFailure{.kind = LinkFailure::Kind::Gone, .ranks = {4}, .reason = "has left the group"}}, piece),
              HasSubstr("can't finish: rank 4 has left the group"));
  EXPECT_THAT(error_of({.failure = LinkFailure{.kind = LinkFailure::Kind::Aborted, .reason = "enough of this"}}, piece),
              HasSubstr("was broken off: enough of this"));
  EXPECT_THAT(error_of({}, {.whole = at::zeros({4}), .own = values({2})}),
              AllOf(HasSubstr("can't take part"), HasSubstr("whole has 4 elements, but 3 ranks with own parts of 1 make 3")));
}

}  // namespace
}  // namespace tessera::testing::host_transport_test
