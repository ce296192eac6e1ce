// LevelsLink: a link between ranks of several hosts, made of a link among the ranks of this host and a link among all ranks.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "tessera/comm/host/link.h"

namespace tessera {

/// Sends data that all ranks of a host need over the network once: the ranks of each host take turns in receiving from the ranks of another
/// host (Topology::partner), and pass on within their host what they have received.
class LevelsLink final : public Link {
 public:
  /// `inner` connects the ranks of this host, in their order, and `outer` all ranks of the topology.
  LevelsLink(std::shared_ptr<Link> inner, std::shared_ptr<Link> outer, Topology topology);

  int rank() const override { return outer_->rank(); }
  std::span<const int> world_ranks() const override { return outer_->world_ranks(); }
  void combine(Digest& digest, Clock::time_point deadline) override;
  void all_gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override;
  void exchange(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override;
  void all_to_all(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline) override;
  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override;
  /// Only for the ranks of each host (Among::Host), which see one stretch of memory with the parts of all ranks.
  SharedAttempt share(const AreaShape& shape, Clock::time_point deadline) override;
  void ask(std::function<bool()> does_wait, std::function<std::string()> what, std::function<bool()> is_busy) override {
    inner_->ask(std::move(does_wait), std::move(what), std::move(is_busy));
  }
  void used_by_this_thread() override { inner_->used_by_this_thread(); }
  void abort(std::string_view reason, int culprit) noexcept override;

  const Topology& topology() const { return topology_; }
  std::span<const int> ranks_here() const { return topology_.ranks_on(host_); }
  int place() const { return inner_->rank(); }
  /// For each turn in which the ranks of this host work together, calls `act` with ranks of one host: the rank at place i of this host
  /// takes care of ranks[i], if there is such a rank. In the turn of this host's own ranks, each takes care of itself.
  template <class Act>
  void for_each_turn(const Act& act) const {
    const auto most = ranks_here().size();
    for (int host = 0; host < topology_.hosts(); host++) {
      for (auto rest = topology_.ranks_on(host); !rest.empty(); rest = rest.subspan(std::min(most, rest.size()))) {
        act(rest.first(std::min(most, rest.size())));
      }
    }
  }

  /// The first half of all_gather(), where the ranks of a host share the memory of `from`: returns when it is complete.
  void all_gather_on_host(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline);
  /// all_to_all() among the ranks of this host.
  void all_to_all_on_host(std::span<const ConstBytes> to, Visit visit, Clock::time_point deadline);

 private:
  template <class Act>
  void among_all(const Act& act);
  void receive_from_hosts(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline);

  const std::shared_ptr<Link> inner_, outer_;
  const Topology topology_;
  const int host_;
  std::vector<ConstBytes> to_;  // for each rank, as are the bytes below; members so that their memory is reused
  std::vector<Bytes> from_;
};

}  // namespace tessera
