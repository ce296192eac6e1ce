// Compares two checkpoints, of any formats and numbers of ranks.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

namespace tessera::checkpoint {

struct DiffOptions {
  int64_t memory = 1'000'000'000;  // most bytes of a tensor that are in memory at once
  /// Called after each piece of a tensor, with the tensor's name, the bytes compared so far, and the bytes to be compared in all.
  std::function<void(const std::string& name, int64_t bytes, int64_t all)> progress = {};
};

/// A tensor that differs between the two checkpoints.
struct TensorDifference {
  std::string name;
  std::string one, other;       // dtype and shape in each checkpoint: "Float [2, 3]"
  int64_t values = 0;           // number of values that differ; 0 if the shapes differ
  double largest = 0;           // largest absolute difference
  double largest_relative = 0;  // largest difference as a fraction of the larger of the two values
};

struct Difference {
  int64_t equal = 0;  // number of equal tensors
  std::vector<std::string> only_one = {}, only_other = {};
  std::vector<TensorDifference> different = {};

  bool is_none() const { return only_one.empty() && only_other.empty() && different.empty(); }
};

/// Compares models, the states of optimizers, and the generators of rank 0. State under PyTorch's names is compared with the same state
/// under Tessera's. NaNs are equal, and the dtype of a step count does not matter. Notes and settings are not compared.
Difference diff(const std::filesystem::path& one, const std::filesystem::path& other, const DiffOptions& options = {});

/// Formats differences for programs.
std::string to_json(const Difference& difference);
/// Formats differences for people.
std::string to_table(const Difference& difference);

}  // namespace tessera::checkpoint
