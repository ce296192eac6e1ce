// Samples in memory: a whole data set, or the few of one batch.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <span>

namespace tessera::data {

/// Row i of both tensors belongs to sample i.
struct Samples {
  at::Tensor inputs;
  at::Tensor targets;
  int64_t repeats = 0;  // so many at the end only fill a batch (Tail::Fill): a test set must not count them

  int64_t size() const { return inputs.defined() ? inputs.size(0) : 0; }
};

/// The samples with these numbers, copied.
Samples pick(const Samples& all, std::span<const int64_t> numbers);

enum class Split { Train, Test };

struct FakeImages {
  int64_t count = 10000;
  int64_t height = 28, width = 28;
  int64_t classes = 10;
  Split split = Split::Train;
  uint64_t seed = 0;
};

/// Images to try a program with where no data set is at hand, as bytes like those of read_idx_folder. Each class has a pattern of its own
/// under noise, so that there is something to learn. The same options give the same images on every machine; both splits have the same
/// patterns.
Samples fake_images(const FakeImages& options = {});

}  // namespace tessera::data
