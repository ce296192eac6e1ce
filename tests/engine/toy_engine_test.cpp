// An engine that is no part of the library: ranks are threads, and read each other's tensors where they lie. It passes the conformance
// checks, and trains with the same bits as any other.
#include <gtest/gtest.h>

#include "gpt.h"
#include "tessera/comm/conformance.h"
#include "tessera/comm/engine.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"
#include "tessera/comm/shm/shared_memory_link.h"

namespace tessera::testing::toy_engine_test {
namespace {

/// Where each rank of a group shows the others a tensor.
struct Board {
  explicit Board(size_t ranks) : shown(ranks), parts(ranks) {}
  std::vector<at::Tensor> shown;
  std::vector<std::shared_ptr<Board>> parts;  // the board of the part that each rank leads
};

class ToyTransport final : public Transport {
 public:
  ToyTransport(GroupTraits traits, std::shared_ptr<Link> link, std::shared_ptr<Board> board)
      : Transport(with_ranks_of(*link, std::move(traits))), link_(std::move(link)), board_(std::move(board)) {}

  Moved all_gather(std::span<const Piece> pieces, std::span<at::Tensor> /*operands*/, const Launch& start) override {
    uint64_t sent = 0;
    for (const auto& [whole, own, squares] : pieces) {
      show(own, start, [&](const std::vector<at::Tensor>& all) {
        for (size_t r = 0; r < all.size(); r++) slice(whole, r).copy_(all[r].view({-1}));
      });
      sent += to_others(own);
    }
    return {.bytes = sent};
  }

  Moved reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& start) override {
    uint64_t sent = 0;
    for (const auto& [whole, own, squares] : pieces) {
      const auto outgoing = whole.to(*reduction.wire_dtype);
      show(outgoing, start, [&](const std::vector<at::Tensor>& all) {
        std::vector<ConstBytes> rows;
        for (const auto& each : all) rows.push_back(bytes_of(slice(each, rank())));
        if (squares) *squares = 0;
        Reducer(reduction).reduce(rows, own.view({-1}), traits().topology, squares.get());
      });
      sent += outgoing.nbytes() - outgoing.nbytes() / board_->shown.size();
    }
    return {.bytes = sent};
  }

  Moved all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& start) override {
    const auto result = at::empty_like(tensor);
    show(tensor.to(*reduction.wire_dtype), start, [&](const std::vector<at::Tensor>& all) {
      std::vector<ConstBytes> rows;
      for (const auto& each : all) rows.push_back(bytes_of(each));
      Reducer(reduction).reduce(rows, result, traits().topology);
    });
    tensor.copy_(result);  // now that everybody has read it
    return {.bytes = to_others(tensor)};
  }

  Moved broadcast(const at::Tensor& tensor, int root, const Launch& start) override {
    show(tensor, start, [&](const std::vector<at::Tensor>& all) {
      if (rank() != static_cast<size_t>(root)) tensor.copy_(all[static_cast<size_t>(root)]);
    });
    return {.bytes = rank() == static_cast<size_t>(root) ? to_others(tensor) : 0};
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& start) override {
    const auto members = members_of(colors, link_->rank());
    const auto leader = static_cast<size_t>(members.front());
    if (leader == rank()) board_->parts[leader] = std::make_shared<Board>(members.size());
    std::shared_ptr<Board> board;
    show({}, start, [&](const std::vector<at::Tensor>&) { board = board_->parts[leader]; });
    return std::make_unique<ToyTransport>(with_ranks_of(*part, traits(), colors), part, std::move(board));
  }

 private:
  size_t rank() const { return static_cast<size_t>(link_->rank()); }
  uint64_t to_others(const at::Tensor& tensor) const { return tensor.nbytes() * (board_->shown.size() - 1); }
  at::Tensor slice(const at::Tensor& whole, size_t r) const {
    const auto size = whole.numel() / std::ssize(board_->shown);
    return whole.view({-1}).narrow(0, static_cast<int64_t>(r) * size, size);
  }

  template <class Read>
  void show(const at::Tensor& own, const Launch& start, const Read& read) {
    Digest nothing;
    board_->shown[rank()] = own;
    link_->combine(nothing, start.end);
    read(board_->shown);
    link_->combine(nothing, start.end);
  }

  const std::shared_ptr<Link> link_;
  const std::shared_ptr<Board> board_;
};

void run_toy(int ranks, const std::function<void(const Communicator&)>& program) {
  const auto block = SharedBlock::make(SharedBlock::Source::Heap, SharedMemoryLink::block_size(ranks));
  const auto board = std::make_shared<Board>(static_cast<size_t>(ranks));
  run_ranks(ranks, [&](const Communicator& outer) {
    const auto link = std::make_shared<SharedMemoryLink>(block, outer.rank(), all_ranks(ranks));
    program(world_over({.link = link, .transport = std::make_unique<ToyTransport>(GroupTraits{.name = "toy"}, link, board)}, {}));
  });
}

TEST(ToyEngine, KeepsItsPromises) {
  for (const int ranks : {1, 2, 3}) {
    run_toy(ranks, [](const Communicator& world) {
      for (const auto& check : conformance_checks(world)) EXPECT_NO_THROW(check.run(world)) << check.operation << " " << check.what;
    });
  }
}

TEST(ToyEngine, TrainsTheGptWithTheSameBits) {
  std::array<checkpoint::StateDict, 2> found;
  run_ranks(2, [&](const Communicator& world) {
    if (auto values = trained_gpt(world); world.is_first()) found[0] = std::move(values);
  });
  run_toy(2, [&](const Communicator& world) {
    if (auto values = trained_gpt(world); world.is_first()) found[1] = std::move(values);
  });
  ASSERT_EQ(found[0].size(), found[1].size());
  for (const auto& [name, value] : found[0]) EXPECT_TRUE(at::equal(found[1].at(name), value)) << name;
}

}  // namespace
}  // namespace tessera::testing::toy_engine_test
