#include "tessera/data/position.h"

#include <fmt/format.h>

#include <sstream>

#include "tessera/base/error.h"

namespace tessera::data {
namespace {

constexpr const char* kPositionFormat = "position-1";
constexpr const char* kPositionBehindSamples = "position-2";  // also has Position::first

}  // namespace

std::string Position::save() const {
  if (first == 0) return fmt::format("{} {} {}", kPositionFormat, epoch, batch);
  return fmt::format("{} {} {} {}", kPositionBehindSamples, epoch, batch, first);
}

Position Position::load(const std::string& text) {
  std::istringstream in(text);
  std::string format, more;
  Position position;
  in >> format >> position.epoch >> position.batch;
  if (format == kPositionBehindSamples) in >> position.first;
  const bool is_known = format == kPositionFormat || format == kPositionBehindSamples;
  if (!in || !is_known || position.epoch < 0 || position.batch < 0 || position.first < 0 || in >> more) {
    throw UsageError("'{}' is not a position in a data set, as Position::save() writes it", text);
  }
  return position;
}

uint64_t scramble(uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

uint64_t seed_of_sample(uint64_t seed, int64_t epoch, int64_t number) {
  return scramble(scramble(scramble(seed) ^ static_cast<uint64_t>(epoch)) ^ static_cast<uint64_t>(number));
}

}  // namespace tessera::data
