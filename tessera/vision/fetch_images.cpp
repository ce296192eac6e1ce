#include "tessera/vision/fetch_images.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>

#include <span>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/vision/codecs.h"
#include "tessera/vision/image.h"

namespace tessera::vision {
namespace {

/// Pictures, which the copies of a fetch share.
struct Fetched {
  const ImageSet images;
  const int64_t size;
  const std::shared_ptr<Damaged> damaged;

  /// Writes the numbers of row i of the batch.
  using ApplyTo = c10::function_ref<void(size_t i, std::string_view bytes, const std::string& name, const at::Tensor& place)>;
  data::Samples batch(std::span<const int64_t> numbers, ApplyTo apply_to) const {
    thread_local std::string buffer;  // for the bytes of one file after the other
    const auto count = std::ssize(numbers);
    data::Samples batch{.inputs = at::empty({count, 3, size, size}, at::kFloat, at::MemoryFormat::ChannelsLast),
                        .targets = at::empty({count}, at::kLong)};
    auto* const targets = batch.targets.mutable_data_ptr<int64_t>();
    for (size_t i = 0; i < numbers.size(); i++) {
      const auto bytes = images.read(numbers[i], buffer);
      const auto place = batch.inputs.select(0, static_cast<int64_t>(i));
      targets[i] = images.labels[static_cast<size_t>(numbers[i])];
      try {
        apply_to(i, bytes, images.name(numbers[i]), place);
        if (damaged) damaged->add_other();
      } catch (const IoError& error) {
        if (!damaged) throw IoError("{}; with --skip-damaged (vision::Damaged) such pictures count for nothing", error.what());
        damaged->add(images.name(numbers[i]), error);
        place.zero_();
        targets[i] = kDamagedTarget;
      }
    }
    return batch;
  }
};

std::shared_ptr<const Fetched> shared(ImageSet images, int64_t size, std::shared_ptr<Damaged> damaged) {
  if (size < 1) throw UsageError("a transform can't make pictures of {} by {}; give it a size", size, size);
  return std::make_shared<const Fetched>(std::move(images), size, std::move(damaged));
}

}  // namespace

std::set<std::string> Damaged::names() const {
  const std::lock_guard lock(mutex_);
  return names_;
}

std::set<std::string> Damaged::names_on(const Communicator& world) const {
  std::string own(1, has_others_ ? '+' : '-');
  for (const auto& name : names()) own += name + '\0';
  std::set<std::string> all;
  bool has_others = false;
  for (const auto& text : world.texts(own, {.unit = "damaged pictures"})) {
    has_others = has_others || text.front() == '+';
    for (size_t begin = 1, end = 0; (end = text.find('\0', begin)) != std::string::npos; begin = end + 1)
      all.insert(text.substr(begin, end - begin));
  }
  if (!all.empty() && !has_others) {
    throw IoError("not one picture could be decoded, but {} are damaged, such as {}; the log says why", all.size(), *all.begin());
  }
  return all;
}

void Damaged::add(const std::string& name, const std::exception& error) {
  const std::lock_guard lock(mutex_);
  if (names_.insert(name).second) log(LogLevel::Warning, "a damaged picture counts for nothing: {}", error.what());
}

void apply(const TrainTransform& transform, std::string_view bytes, const std::string& name, uint64_t seed, const at::Tensor& place) {
  Draws draws(seed);
  const auto side = transform.crop.size;
  const auto part = draw_box(transform.crop, size_of_image(bytes, name), draws);  // so that no more is decoded than is used
  auto image = decode_image(bytes, name, {.part = part, .may_shrink_to = transform.may_shrink ? side : 0});
  image = resize(image, {.height = side, .width = side}, transform.interpolation);
  if (transform.flip && draws.chance(0.5)) image = flip(image);
  image = jitter(image, transform.jitter, draws);
  if (transform.augment) image = rand_augment(image, *transform.augment, draws);
  normalize_into(image, transform.normalize, place);
}

void apply(const TestTransform& transform, std::string_view bytes, const std::string& name, const at::Tensor& place) {
  const auto asked = resized_shorter_side(size_of_image(bytes, name), transform.shorter_side);
  const auto resized = checked_size(asked.height, asked.width, name);  // a picture one pixel high may be very wide
  const auto image = decode_image(bytes, name, {.may_shrink_to = transform.may_shrink ? transform.shorter_side : 0});
  const auto middle = center_box(resized, {.height = transform.size, .width = transform.size});
  normalize_into(crop(resize(image, resized, transform.interpolation), middle), transform.normalize, place);
}

data::SeededFetch fetch_images(ImageSet images, const TrainTransform& transform, std::shared_ptr<Damaged> damaged) {
  return [transform, of = shared(std::move(images), transform.crop.size, std::move(damaged))](std::span<const int64_t> numbers,
                                                                                              std::span<const uint64_t> seeds) {
    return of->batch(numbers, [&](size_t i, std::string_view bytes, const std::string& name, const at::Tensor& place) {
      apply(transform, bytes, name, seeds[i], place);
    });
  };
}

data::Fetch fetch_images(ImageSet images, const TestTransform& transform, std::shared_ptr<Damaged> damaged) {
  return [transform, of = shared(std::move(images), transform.size, std::move(damaged))](std::span<const int64_t> numbers) {
    return of->batch(numbers, [&](size_t /*i*/, std::string_view bytes, const std::string& name, const at::Tensor& place) {
      apply(transform, bytes, name, place);
    });
  };
}

}  // namespace tessera::vision
