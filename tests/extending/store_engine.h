// An engine of one's own: ranks show each other their tensors through the store in which they have met. Slow, and complete.
#pragma once

#include <ATen/ATen.h>
#include <tessera/extending.h>

#include <string>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <vector>

namespace own {

class StoreTransport final : public tessera::Transport {
 public:
  StoreTransport(tessera::GroupTraits traits, std::shared_ptr<tessera::Link> link, tessera::StorePtr store)
      : Transport(with_ranks_of(*link, std::move(traits))), link_(std::move(link)), store_(std::move(store)) {}

  tessera::Moved all_gather(std::span<const tessera::Piece> pieces, std::span<at::Tensor> /*operands*/,
                            const tessera::Launch& start) override {
    uint64_t sent = 0;
    for (const auto& piece : pieces) {
      const auto all = shown(tessera::bytes_of(piece.own), start);
      for (size_t r = 0; r < all.size(); r++)
        std::ranges::copy(all[r], tessera::part_of(tessera::bytes_of(piece.whole), r, all.size()).begin());
      sent += piece.own.nbytes();
    }
    return {.bytes = sent};
  }

  tessera::Moved reduce_scatter(std::span<const tessera::Piece> pieces, const tessera::Reduction& reduction,
                                const tessera::Launch& start) override {
    uint64_t sent = 0;
    for (const auto& piece : pieces) {
      const auto outgoing = piece.whole.to(*reduction.wire_dtype);
      auto all = shown(tessera::bytes_of(outgoing), start);
      std::vector<tessera::ConstBytes> rows;
      for (auto& each : all) rows.push_back(tessera::part_of(each, rank(), all.size()));
      if (piece.squares) *piece.squares = 0;
      tessera::Reducer(reduction).reduce(rows, piece.own.view({-1}), traits().topology, piece.squares.get());
      sent += outgoing.nbytes();
    }
    return {.bytes = sent};
  }

  tessera::Moved all_reduce(const at::Tensor& tensor, const tessera::Reduction& reduction, const tessera::Launch& start) override {
    const auto outgoing = tensor.to(*reduction.wire_dtype);
    const auto all = shown(tessera::bytes_of(outgoing), start);
    tessera::Reducer(reduction).reduce(std::vector<tessera::ConstBytes>(all.begin(), all.end()), tensor, traits().topology);
    return {.bytes = outgoing.nbytes()};
  }

  tessera::Moved broadcast(const at::Tensor& tensor, int root, const tessera::Launch& start) override {
    const bool sends = link_->rank() == root;
    const auto bytes = tessera::bytes_of(tensor);
    const auto all = shown(sends ? bytes : tessera::Bytes(), start);
    if (!sends) std::ranges::copy(all[static_cast<size_t>(root)], bytes.begin());
    return {.bytes = sends ? bytes.size() : 0};
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<tessera::Link> part,
                                   const tessera::Launch& /*start*/) override {
    const auto color = std::to_string(colors[rank()]);
    auto store = c10::make_intrusive<c10d::PrefixStore>("split/" + std::to_string(splits_++) + "/" + color, store_);
    auto of_part = with_ranks_of(*part, traits(), colors);
    return std::make_unique<StoreTransport>(std::move(of_part), std::move(part), std::move(store));
  }

 private:
  using Row = std::vector<std::byte>;
  size_t rank() const { return static_cast<size_t>(link_->rank()); }
  std::string key(uint64_t turn, int rank) const { return std::to_string(turn) + "/" + std::to_string(rank); }

  /// Returns the bytes that each rank passes as `own`.
  std::vector<Row> shown(tessera::ConstBytes own, const tessera::Launch& start) {
    const auto* first = reinterpret_cast<const uint8_t*>(own.data());
    store_->set(key(turn_, link_->rank()), std::vector<uint8_t>(first, first + own.size()));
    std::vector<Row> all;
    for (int r = 0; r < link_->size(); r++) {
      const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(start.end - tessera::Clock::now());
      store_->wait({key(turn_, r)}, std::max(left, std::chrono::milliseconds(1)));
      const auto row = store_->get(key(turn_, r));
      const auto* begin = reinterpret_cast<const std::byte*>(row.data());
      all.emplace_back(begin, begin + row.size());
    }
    // All ranks are in this turn, so nobody still reads the bytes of the last one.
    if (turn_ > 0) store_->deleteKey(key(turn_ - 1, link_->rank()));
    turn_++;
    return all;
  }

  const std::shared_ptr<tessera::Link> link_;
  const tessera::StorePtr store_;
  uint64_t turn_ = 0, splits_ = 0;
};

/// Ranks agree over the memory of their host.
inline tessera::Connection connect_store(const tessera::Meeting& meeting) {
  auto link = tessera::connect_shm(meeting).link;
  auto store = c10::make_intrusive<c10d::PrefixStore>("own/store", meeting.store);
  auto transport = std::make_unique<StoreTransport>(tessera::GroupTraits{.name = "store", .topology = meeting.topology}, link, store);
  return {.link = std::move(link), .transport = std::move(transport)};
}

/// For init and TESSERA_TRANSPORT=store, in every program that has this line.
inline const tessera::AddedEngine store_engine({.name = "store",
                                                .ranks = "processes of this host",
                                                .reach = tessera::Engine::Reach::OneHost,
                                                .why_not = tessera::why_no_shm,
                                                .connect = connect_store});

}  // namespace own
