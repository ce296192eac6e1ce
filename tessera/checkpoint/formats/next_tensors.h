// NextTensors: the tensors of a file that is being written, and which of them comes next.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "tessera/checkpoint/formats/safetensors_header.h"

namespace tessera::checkpoint {

/// Checks that the writer gets the values of all tensors in order. If not, throws UsageError, which names the file and the tensor.
class NextTensors {
 public:
  NextTensors(std::filesystem::path file, std::vector<SafetensorsEntry> entries) : file_(std::move(file)), entries_(std::move(entries)) {}

  const std::vector<SafetensorsEntry>& all() const { return entries_; }
  /// Throws unless `tensor` has the dtype and the shape of the next tensor.
  void expect_whole(const at::Tensor& tensor) const;
  struct Taken {
    at::Tensor values;  // contiguous, on the CPU
    size_t number;      // index of the tensor
    bool begins, ends;  // whether the values are the tensor's first, and whether they are its last
  };
  /// Takes the next values of a tensor that comes in pieces, in row-major order.
  Taken take(const at::Tensor& values);
  /// Takes and returns all remaining tensors, for files that other processes fill.
  std::span<const SafetensorsEntry> take_rest();
  /// Throws unless all tensors have been taken.
  void expect_none() const;

 private:
  const SafetensorsEntry& next() const;

  std::filesystem::path file_;
  std::vector<SafetensorsEntry> entries_;
  size_t next_ = 0;
  int64_t written_ = 0;  // how many values of the next tensor have been taken
};

}  // namespace tessera::checkpoint
