// Batches of pictures: reads, decodes and transforms them in a Loader's workers.
#pragma once

#include <ATen/core/Tensor.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>

#include "tessera/comm/communicator.h"
#include "tessera/data/loader.h"
#include "tessera/vision/image_set.h"
#include "tessera/vision/transforms.h"

namespace tessera::vision {

/// The usual transform for training: a random part, mirrored in half the cases, with changed colours.
struct TrainTransform {
  RandomResizedCrop crop = {};
  Interpolation interpolation = Interpolation::Bilinear;
  bool flip = true;
  ColorJitter jitter = {};
  std::optional<RandAugment> augment = {};
  Normalize normalize = {};
  bool may_shrink = false;  // a JPEG may be decoded at a fraction of its size, which is faster and changes pixels a little
};

/// The usual transform for tests: the middle.
struct TestTransform {
  int64_t shorter_side = 256;
  int64_t size = 224;
  Interpolation interpolation = Interpolation::Bilinear;
  Normalize normalize = {};
  bool may_shrink = false;
};

/// Returns the TestTransform::shorter_side that is usual for ImageNet with this size: 256 for 224.
constexpr int64_t usual_shorter_side(int64_t size) {
  return (size * 8 + 3) / 7;
}

/// Decodes a picture's file and writes the numbers that a network takes to `place`, a float tensor {3, size, size} with any strides. All
/// draws come from `seed`. Errors call the picture `name`.
void apply(const TrainTransform& transform, std::string_view bytes, const std::string& name, uint64_t seed, const at::Tensor& place);
void apply(const TestTransform& transform, std::string_view bytes, const std::string& name, const at::Tensor& place);

/// The target of a damaged picture, which cross_entropy ignores.
constexpr int64_t kDamagedTarget = -100;
/// Makes pictures that can't be decoded count for nothing: their numbers are 0 and their target is kDamagedTarget. The log names each once.
/// A picture that can't be read, because its file is missing or the disk fails, is still an error. A Damaged has all such pictures of this
/// process, including those of batches that a Loader fetches ahead and never returns.
class Damaged {
 public:
  /// Returns the pictures that can't be decoded, by ImageSet::name.
  std::set<std::string> names() const;
  /// Returns those of all ranks. Throws IoError on every rank if there are some and no rank could decode any picture. Collective.
  std::set<std::string> names_on(const Communicator& world) const;

  /// For fetch_images. `error` has the picture's name.
  void add(const std::string& name, const std::exception& error);
  void add_other() { has_others_ = true; }

 private:
  mutable std::mutex mutex_;
  std::set<std::string> names_;
  std::atomic<bool> has_others_ = false;
};

/// Returns a function for a Loader whose Sampler has as many samples as there are pictures. Inputs are floats {n, 3, size, size}, channels
/// last, and targets are labels. Without `damaged`, a damaged picture throws IoError with its path.
data::SeededFetch fetch_images(ImageSet images, const TrainTransform& transform = {}, std::shared_ptr<Damaged> damaged = {});
data::Fetch fetch_images(ImageSet images, const TestTransform& transform, std::shared_ptr<Damaged> damaged = {});

}  // namespace tessera::vision
