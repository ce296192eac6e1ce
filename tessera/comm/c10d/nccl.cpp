// Makes c10d's NCCL backend. Only this source depends on NCCL; it is built when libtorch's CUDA part is linked.
#include "tessera/comm/c10d/connect.h"

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

namespace tessera {

BackendPtr make_nccl(const StorePtr& store, int rank, int size) {
  const auto options = c10d::ProcessGroupNCCL::Options::create(/*is_high_priority_stream=*/true);
  options->timeout = std::chrono::hours(24 * 365);  // in effect no limit: Group limits each operation, and its error names ranks
  return c10::make_intrusive<c10d::ProcessGroupNCCL>(store, rank, size, options);
}

}  // namespace tessera
