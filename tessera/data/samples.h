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
  /// Of a batch: how much the mean loss of these samples counts on this rank, so that the mean over ranks is that over all samples of the
  /// batch. Other than 1 only where ranks have different numbers of them. Trainer::backward multiplies the loss by it.
  double weight = 1;

  int64_t size() const { return inputs.defined() ? inputs.size(0) : 0; }
};

/// A text that is another one for other samples: LoaderOptions::data. Reads all of them.
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
