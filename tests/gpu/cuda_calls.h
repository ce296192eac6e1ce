// Counts the calls by which the host waits for a GPU, and those by which it gives it something to do. The program defines CUDA's own
// functions, and symbols of a program come before those of the libraries that it loads.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera::testing {

/// The calls of this process while an object lives, each with the stack that led to it.
class CudaCalls {
 public:
  CudaCalls();
  ~CudaCalls();
  CudaCalls(const CudaCalls&) = delete;
  CudaCalls& operator=(const CudaCalls&) = delete;

  std::vector<std::string> calls() const;
};

/// How many kernels, copies and events this process has asked for until now. (Kernels of libraries that call the driver itself are not seen.)
int64_t requests();

}  // namespace tessera::testing
