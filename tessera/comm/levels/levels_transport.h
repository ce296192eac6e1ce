// The transport over a LevelsLink: sums are taken within each host first, so that what crosses the network does so once a host.
#pragma once

#include <memory>

#include "tessera/comm/host/host_transport.h"
#include "tessera/comm/levels/levels_link.h"

namespace tessera {

/// A transport for host memory over any link: over two levels if the link has two.
std::unique_ptr<Transport> transport_over(GroupTraits traits, std::shared_ptr<Link> link);

/// Gives the same bits as HostTransport, because the sums have the same order. Sums cross the network in sum_dtype.
class LevelsTransport final : public HostTransport {
 public:
  LevelsTransport(GroupTraits traits, std::shared_ptr<LevelsLink> link)
      : HostTransport(std::move(traits), link), levels_(std::move(link)) {}

  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override;

 private:
  void gather(ConstBytes own, std::span<const Bytes> from, Among whole_of, const Launch& start, Moved& moved) override;
  void reduce(const Reduction& reduction, std::span<const ConstBytes> to, const at::Tensor& own, const Launch& start, double* squares,
              Moved& moved) override;

  const std::shared_ptr<LevelsLink> levels_;
};

}  // namespace tessera
