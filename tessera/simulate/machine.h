// Machine: how fast the computer of a rank computes, moves memory and reaches other ranks; what dry runs and plans compute times by.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <string>
#include <vector>

namespace tessera::simulate {

/// A message takes `latency` seconds, and its bytes at `bandwidth` per second besides. Both directions at once are as fast as one.
struct MachineLink {
  double latency = 0, bandwidth = 0;
};

/// How fast a matrix product is whose smallest side (of rows, columns and the side that is summed over) is `side`: operations per second of a
/// rank while all ranks of its host compute.
struct ProductSpeed {
  double side = 0, float32 = 0, bfloat16 = 0;
};

/// Seconds, bytes, and both per second. `tessera test --calibrate FILE` measures the machine on which it runs.
struct Machine {
  std::string kind = "cpu";             // cpu or gpu: how collectives run
  std::vector<ProductSpeed> products;   // in the order of their sides
  double convolution_flops = 0;         // in float32
  double bandwidth = 0;                 // of a pass over tensors that do not fit the cache: bytes read and written
  double cached_bandwidth = 0;          // of a pass over at most `cache` bytes
  double cache = 0;                     // a rank's part of the cache
  double call = 0;                      // what a small operator takes by itself
  double optimizer_bandwidth = 0;       // of the fused step of an optimizer
  int ranks_per_host = 1;
  MachineLink inner;                    // between ranks of a host
  MachineLink outer;                    // of a host to the network; its ranks share it
  double message = 0;                   // what a message costs the processor of a rank
  double memory = 0;                    // of a host that its ranks may use; 0 if unknown

  /// Built-in round numbers for servers of CPUs, and for servers of 8 GPUs with NVLink.
  static Machine cpu();
  static Machine gpu();
  /// The machine in a file, or a built-in one: "cpu" or "gpu". Throws IoError or ConfigError, which name the file and the field.
  static Machine named(const std::string& name);
  /// The machine that TESSERA_MACHINE names; cpu() if it is unset.
  static Machine of_environment();
  void write(const std::filesystem::path& file) const;

  double product_seconds(double flops, double smallest_side, at::ScalarType dtype) const;
  double convolution_seconds(double flops, at::ScalarType dtype) const;
  /// An operator that reads and writes this many bytes in all.
  double pass_seconds(double bytes) const;
  double optimizer_seconds(double bytes) const;
};

}  // namespace tessera::simulate
