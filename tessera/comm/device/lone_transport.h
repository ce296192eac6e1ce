// The transport of a group of one rank on a device: what would be moved is copied, on the stream of the caller.
#pragma once

#include "tessera/comm/transport.h"

namespace tessera {

class LoneTransport final : public Transport {
 public:
  explicit LoneTransport(GroupTraits traits) : Transport(std::move(traits)) {}

  Moved all_gather(std::span<const Piece> pieces, std::span<at::Tensor> operands, const Launch& start) override;
  Moved reduce_scatter(std::span<const Piece> pieces, const Reduction& reduction, const Launch& start) override;
  Moved all_reduce(const at::Tensor& tensor, const Reduction& reduction, const Launch& start) override;
  Moved broadcast(const at::Tensor& tensor, int root, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part, const Launch& start) override;
};

}  // namespace tessera
