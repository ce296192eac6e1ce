// A c10d backend for the delayed device, with a stream of its own as NCCL has. Its peers are simulated: each does what this rank does.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace tessera::testing {

c10::intrusive_ptr<c10d::Backend> delayed_backend(int rank, int size);

}  // namespace tessera::testing
