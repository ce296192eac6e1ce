#include "tessera/comm/levels/levels_transport.h"

#include <ATen/ATen.h>

#include <vector>

#include "tessera/comm/host/bytes.h"
#include "tessera/comm/host/reducer.h"

namespace tessera {

std::unique_ptr<Transport> transport_over(GroupTraits traits, std::shared_ptr<Link> link) {
  auto levels = std::dynamic_pointer_cast<LevelsLink>(link);
  traits.levels = levels ? 2 : 1;
  if (levels) return std::make_unique<LevelsTransport>(std::move(traits), std::move(levels));
  return std::make_unique<HostTransport>(std::move(traits), std::move(link));
}

std::unique_ptr<Transport> LevelsTransport::split(std::span<const int> colors, std::shared_ptr<Link> part) {
  auto of_part = with_ranks_of(*part, traits(), colors);
  return transport_over(std::move(of_part), std::move(part));
}

void LevelsTransport::gather(ConstBytes own, std::span<const Bytes> from, Among whole_of, const Launch& start, Moved& moved) {
  const auto& topology = levels_->topology();
  const auto here = levels_->ranks_here();
  const auto place = static_cast<size_t>(levels_->place());
  for (int host = 0; host < topology.hosts(); host++) {
    if (host != topology.host_of(here.front())) count(moved, topology.partner(levels_->rank(), host), own.size());
  }
  if (whole_of == Among::Host) return levels_->all_gather_on_host(own, from, start.end);
  levels_->all_gather(own, from, start.end);
  levels_->for_each_turn([&](std::span<const int> ranks) {
    if (place >= ranks.size()) return;
    for (const int rank : here) count(moved, rank, from[static_cast<size_t>(ranks[place])].size());
  });
}

void LevelsTransport::reduce(const Reduction& reduction, std::span<const ConstBytes> to, const at::Tensor& own, const Launch& start,
                             double* squares, Moved& moved) {
  const Reducer reducer(reduction);
  const auto& topology = levels_->topology();
  const auto here = levels_->ranks_here();
  const auto place = static_cast<size_t>(levels_->place()), self = static_cast<size_t>(levels_->rank());
  const auto width = c10::elementSize(*reduction.wire_dtype);
  const auto empty = [&](size_t numel) { return at::empty({static_cast<int64_t>(numel)}, at::TensorOptions(*reduction.sum_dtype)); };
  // Within the host: for each rank, one rank of this host adds what its ranks send there.
  std::vector<at::Tensor> sums(to.size());
  levels_->for_each_turn([&](std::span<const int> ranks) {
    std::vector<ConstBytes> parts(here.size());
    for (size_t i = 0; i < ranks.size(); i++) {
      parts[i] = to[static_cast<size_t>(ranks[i])];
      count(moved, here[i], parts[i].size());
    }
    at::Tensor sum;
    if (place < ranks.size()) sum = sums[static_cast<size_t>(ranks[place])] = empty(parts[place].size() / width);
    levels_->all_to_all_on_host(
        parts,
        [&](size_t begin, std::span<const ConstBytes> rows) {
          if (rows.front().size() < width) return;  // this part has ended; the parts of other ranks are longer
          const auto numel = static_cast<int64_t>(rows.front().size() / width);
          reducer.reduce_host(rows, sum.narrow(0, static_cast<int64_t>(begin / width), numel));
        },
        start.end);
  });
  // Between the hosts: each rank gets the sums of the other hosts.
  std::vector<ConstBytes> outgoing(to.size()), rows;
  std::vector<Bytes> incoming(to.size());
  std::vector<at::Tensor> arrivals;
  for (int host = 0; host < topology.hosts(); host++) {
    const bool is_here = host == topology.host_of(here.front());
    arrivals.push_back(is_here ? sums[self] : empty(to[self].size() / width));
    if (!is_here) incoming[static_cast<size_t>(topology.partner(static_cast<int>(self), host))] = bytes_of(arrivals.back());
    rows.push_back(bytes_of(arrivals.back()));
  }
  for (size_t r = 0; r < to.size(); r++) {
    if (r == self || !sums[r].defined()) continue;
    outgoing[r] = bytes_of(sums[r]);
    count(moved, static_cast<int>(r), outgoing[r].size());
  }
  levels_->exchange(outgoing, incoming, start.end);
  if (own.numel() > 0) reducer.reduce_hosts(rows, own, topology.ranks(), squares);
}

}  // namespace tessera
