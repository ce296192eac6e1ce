#include "tessera/vision/image_set.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/words.h"
#include "tessera/data/position.h"

namespace tessera::vision {
namespace {

const ImageSet::Place& place_in(const ImageSet& images, int64_t number) {
  if (number >= 0 && number < std::ssize(images.places)) return images.places[static_cast<size_t>(number)];
  throw UsageError("there is no picture {}: the set has {}; the sampler's size must be that of the set", number, images.places.size());
}

}  // namespace

std::string ImageSet::name(int64_t number) const {
  const auto& place = place_in(*this, number);
  return roots[place.root].string() + '/' + printable(place.name);
}

std::string_view ImageSet::read(int64_t number, std::string& buffer) const {
  const auto& place = place_in(*this, number);
  const bool is_part = place.offset > 0;
  const InputFile file(is_part ? roots[place.root] : roots[place.root] / place.name);
  const auto size = is_part ? place.size : file.size();
  if (buffer.size() < size) buffer.resize(size);
  file.read(buffer.data(), size, place.offset);
  return std::string_view(buffer).substr(0, size);
}

std::string ImageSet::fingerprint() const {
  uint64_t print = 0;
  const auto add = [&](uint64_t value) { print = data::scramble(print ^ value); };
  const auto add_text = [&](const std::string& text) {
    for (const char letter : text) add(static_cast<uint8_t>(letter));
    add(text.size());
  };
  for (const auto& name : classes) add_text(name);
  for (size_t i = 0; i < places.size(); i++) {
    add_text(places[i].name);
    for (const auto value : {static_cast<uint64_t>(labels[i]), places[i].offset, places[i].size}) add(value);
  }
  return fmt::format("pictures {:016x}", print);
}

bool is_picture_name(std::string_view name) {
  const auto small = lower(name.substr(name.size() - std::min(name.size(), std::string_view(".jpeg").size())));
  return std::ranges::any_of(std::array{".jpg", ".jpeg", ".png", ".webp"}, [&](const char* ending) { return small.ends_with(ending); });
}

}  // namespace tessera::vision
