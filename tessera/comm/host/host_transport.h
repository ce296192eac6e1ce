// Moves tensors in host memory over any Link, and adds them in a fixed order.
#pragma once

#include <memory>

#include "tessera/comm/host/link.h"
#include "tessera/comm/transport.h"

namespace tessera {

class HostTransport final : public Transport {
 public:
  /// The ranks come from the link.
  HostTransport(GroupTraits traits, std::shared_ptr<Link> link)
      : Transport(with_ranks_of(*link, std::move(traits))), link_(std::move(link)) {}

  Moved all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands, const Launch& start) override;
  Moved reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& start) override;
  Moved all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& start) override;
  Moved broadcast(const at::Tensor& tensor, int root, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& start) override;

 private:
  size_t size() const { return static_cast<size_t>(link_->size()); }
  size_t rank() const { return static_cast<size_t>(link_->rank()); }
  uint64_t gather(ConstBytes own, std::span<const Bytes> from, const Launch& start);
  /// Reduces what all ranks send to this one into `own`, and returns how many bytes it sent. Adds the squares of `own` to `squares`, if
  /// given.
  uint64_t reduce(const Reduction& reduction, std::span<const ConstBytes> to, const at::Tensor& own, const Launch& start,
                  double* squares = nullptr);

  const std::shared_ptr<Link> link_;
};

}  // namespace tessera
