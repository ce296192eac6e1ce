// Moves tensors in host memory over any Link, and adds them in a fixed order.
#pragma once

#include <memory>

#include "tessera/comm/host/link.h"
#include "tessera/comm/transport.h"

namespace tessera {

class HostTransport final : public Transport {
 public:
  /// Takes the ranks from the link.
  HostTransport(GroupTraits traits, std::shared_ptr<Link> link)
      : Transport(with_ranks_of(*link, std::move(traits))), link_(std::move(link)) {}

  Moved run(const Request& request, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override;

 private:
  size_t size() const { return static_cast<size_t>(link_->size()); }
  size_t rank() const { return static_cast<size_t>(link_->rank()); }
  /// Returns how many bytes it sent, as do the functions below.
  uint64_t move(const Request& request, const Piece& piece, const Launch& start);
  uint64_t gather(ConstBytes own, std::span<const Bytes> from, const Launch& start);
  /// Reduces what all ranks send to this one into `own`. Adds the squares of `own` to `squares`, if given.
  uint64_t reduce(const Reduction& reduction, std::span<const ConstBytes> to, const at::Tensor& own, const Launch& start,
                  double* squares = nullptr);

  const std::shared_ptr<Link> link_;
};

}  // namespace tessera
