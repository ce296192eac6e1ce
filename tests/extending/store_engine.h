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

  tessera::Moved run(const tessera::Request& request, const tessera::Launch& start) override {
    tessera::Moved moved;
    for (const auto& piece : request.pieces) moved.bytes += move(request, piece, start);
    return moved;
  }

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<tessera::Link> part) override {
    const auto color = std::to_string(colors[rank()]);
    auto store = c10::make_intrusive<c10d::PrefixStore>("split/" + std::to_string(splits_++) + "/" + color, store_);
    auto of_part = with_ranks_of(*part, traits(), colors);
    return std::make_unique<StoreTransport>(std::move(of_part), std::move(part), std::move(store));
  }

 private:
  using Row = std::vector<std::byte>;
  size_t rank() const { return static_cast<size_t>(link_->rank()); }
  std::string key(uint64_t turn, int rank) const { return std::to_string(turn) + "/" + std::to_string(rank); }

  /// Returns how many bytes it sent.
  uint64_t move(const tessera::Request& request, const tessera::Piece& piece, const tessera::Launch& start) {
    using tessera::Operation;
    const auto& [whole, own, squares] = piece;
    const bool sends = request.operation != Operation::Broadcast || request.root == link_->rank();
    const auto& source = request.operation == Operation::AllGather ? own : whole;
    const auto outgoing = source.to(request.reduction.wire_dtype.value_or(source.scalar_type()));
    auto all = shown(sends ? tessera::bytes_of(outgoing) : tessera::Bytes(), start);
    if (request.operation == Operation::AllGather) {
      for (size_t r = 0; r < all.size(); r++) std::ranges::copy(all[r], tessera::part_of(tessera::bytes_of(whole), r, all.size()).begin());
    } else if (request.operation == Operation::Broadcast) {
      std::ranges::copy(all[static_cast<size_t>(request.root)], tessera::bytes_of(whole).begin());
    } else {
      std::vector<tessera::ConstBytes> rows;
      for (auto& each : all) rows.push_back(request.has_parts() ? tessera::part_of(each, rank(), all.size()) : each);
      if (squares) *squares = 0;
      tessera::Reducer(request.reduction).reduce(rows, own.view({-1}), traits().topology, squares.get());
    }
    return sends ? outgoing.nbytes() : 0;
  }

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
