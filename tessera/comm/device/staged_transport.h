// Moves the tensors of a device through host memory, over an engine for host memory: several ranks can share one GPU, which NCCL refuses,
// and GPUs need no network of their own.
#pragma once

#include <memory>

#include "tessera/comm/device/device_queue.h"
#include "tessera/comm/transport.h"

namespace tessera {

/// The group's thread waits until the inputs of an operation are ready; the program's own threads do not. The engine for host memory adds
/// values in the same order as without a device, so results have the same bits as on the host.
class StagedTransport final : public Transport {
 public:
  StagedTransport(c10::Device device, std::unique_ptr<Transport> host);

  Moved run(const Request& request, const Launch& start) override;
  std::unique_ptr<Transport> split(std::span<const int> colors, std::shared_ptr<Link> part) override;
  void abort(std::string_view reason) noexcept override { host_->abort(reason); }

 private:
  const std::unique_ptr<Transport> host_;
  const DeviceQueue queue_;
};

}  // namespace tessera
