// Samples in memory: a complete data set or one batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>
#include <string>

namespace tessera::data {

/// Row i of both tensors belongs to sample i.
struct Samples {
  at::Tensor inputs;
  at::Tensor targets;
  int64_t repeats = 0;  // how many samples at the end only fill the batch; metrics of a test set must not count them
  /// The factor for this rank's mean loss that makes the mean over ranks equal to the mean over all samples of a batch. It differs from 1
  /// only if ranks have different numbers of samples. Trainer::backward multiplies the loss by it.
  double weight = 1;

  int64_t size() const { return inputs.defined() ? inputs.size(0) : 0; }
};

/// Returns a hash of all samples as text, for LoaderOptions::data.
std::string fingerprint(const Samples& all);

/// Copies the samples with these numbers.
Samples pick(const Samples& all, std::span<const int64_t> numbers);

enum class Split { Train, Test };

struct FakeImages {
  int64_t count = 10000;
  int64_t height = 28, width = 28;
  int64_t classes = 10;
  Split split = Split::Train;
  uint64_t seed = 0;
};

/// Generated images for trying a program without a data set. They are bytes, like those of read_idx_folder. Each class has its own pattern
/// with noise, so that a model can learn something. The same options give the same images on every machine, and both splits have the same
/// patterns.
Samples fake_images(const FakeImages& options = {});

}  // namespace tessera::data
