// Machine: how fast the computer of a rank computes, moves memory and reaches other ranks; what dry runs and plans compute times by.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <filesystem>
#include <string>

namespace tessera::simulate {

/// A message takes `latency` seconds, and its bytes at `bandwidth` per second besides. Both directions at once are as fast as one.
struct MachineLink {
  double latency = 0, bandwidth = 0;
};

/// Operations per second of a rank while all ranks of its host compute.
struct ProductSpeed {
  double float32 = 0, bfloat16 = 0;
};
/// The smallest sides of matrix products whose speed is known: of rows, columns and the side that is summed over.
inline constexpr std::array kProductSides = {1, 16, 64, 256, 1024};

/// Seconds, bytes, and both per second. `tessera test --calibrate FILE` measures the machine on which it runs.
struct Machine {
  std::string kind = "cpu";                                     // cpu or gpu: how collectives run
  int ranks_per_host = 1;
  std::array<ProductSpeed, kProductSides.size()> products = {};
  double convolution_flops = 0;                                 // in float32
  double bandwidth = 0;                                         // of a pass over more than `cache` bytes: read and written
  double cached_bandwidth = 0;                                  // of a pass over at most `cache` bytes
  double cache = 0;                                             // a rank's part of the cache
  double call = 0;                                              // what a small operator takes by itself
  double optimizer_bandwidth = 0;                               // of the fused step of an optimizer
  MachineLink inner = {};                                       // between ranks of a host
  MachineLink outer = {};                                       // of a host to the network; its ranks share it
  double message = 0;                                           // what a message costs the processor of a rank
  double memory = 0;                                            // of a host that its ranks may use; 0 if unknown

  /// "cpu" or "gpu", which are round numbers for servers of CPUs, and for servers of 8 GPUs with NVLink; or the machine in a file. Throws
  /// IoError or ConfigError, which name the file and the field.
  static Machine named(const std::string& name);
  void write(const std::filesystem::path& file) const;

  double product_seconds(double flops, double smallest_side, at::ScalarType dtype) const;
  double convolution_seconds(double flops, at::ScalarType dtype) const;
  /// An operator that reads and writes this many bytes in all.
  double pass_seconds(double bytes) const;
  double optimizer_seconds(double bytes) const;
};

}  // namespace tessera::simulate
