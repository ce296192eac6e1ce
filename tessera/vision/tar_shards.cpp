#include "tessera/vision/tar_shards.h"

#include <ATen/Parallel.h>

#include <algorithm>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/base/log.h"
#include "tessera/base/words.h"
#include "tessera/vision/tar.h"

namespace tessera::vision {
namespace {

constexpr int64_t kMostClasses = 1 << 20;
constexpr size_t kMostExpanded = 1 << 20;

/// A name in an archive: the text before the first dot of its last part, and the text after it.
struct KeyAndEnding {
  std::string_view key, ending;
};

KeyAndEnding split_at_dot(std::string_view name) {
  const auto slash = name.rfind('/');
  const auto begin = slash == std::string_view::npos ? 0 : slash + 1, dot = name.find('.', begin);
  if (dot == std::string_view::npos || dot == begin) return {};  // such as "README", and the files that macOS adds
  return {.key = name.substr(0, dot), .ending = name.substr(dot + 1)};
}

/// The files of one key, in sequence.
struct Pair {
  const TarMember* picture = nullptr;
  const TarMember* label = nullptr;
};

int64_t label_of(const InputFile& file, const TarMember& member) {
  const auto words = words_in(member.beginning);
  const auto label = words.size() == 1 ? number_of<int64_t>(words.front()) : std::nullopt;
  if (label && *label >= 0 && *label < kMostClasses && member.size == member.beginning.size()) return *label;
  throw IoError("{}, at byte {}: '{}' has no number of a class from 0 to {}, but '{}'", file.path(), member.offset, printable(member.name),
                kMostClasses - 1, printable(member.beginning));
}

void add_pair(const InputFile& file, const Pair& pair, ImageSet& images) {
  const auto* const either = pair.picture != nullptr ? pair.picture : pair.label;
  if (either == nullptr) return;  // other files
  if (pair.picture == nullptr || pair.label == nullptr) {
    throw IoError("{}, at byte {}: '{}' has no {} beside it; the two have one name up to its first dot, and stand one behind the other",
                  file.path(), either->offset, printable(either->name),
                  pair.picture == nullptr ? "picture (.jpg, .jpeg, .png, .webp)" : "label (.cls)");
  }
  images.labels.push_back(label_of(file, *pair.label));
  images.places.push_back({.name = pair.picture->name, .offset = pair.picture->offset, .size = pair.picture->size});
}

ImageSet read_shard(const std::filesystem::path& path) {
  const InputFile file(path);
  const auto members = members_of_tar(file);
  ImageSet images;
  Pair pair;
  std::string_view key;
  for (const auto& member : members) {
    const auto [of_member, ending] = split_at_dot(member.name);
    if (of_member.empty()) continue;
    if (of_member != key) add_pair(file, std::exchange(pair, {}), images);
    key = of_member;
    const bool is_label = lower(ending) == "cls";
    if (!is_label && (ending.find('.') != std::string_view::npos || !is_picture_name(member.name))) continue;
    auto& place = is_label ? pair.label : pair.picture;
    if (place != nullptr)
      throw IoError("{}, at byte {}: '{}' and '{}' are two of one key, of which one must go", path, member.offset, printable(place->name),
                    printable(member.name));
    place = &member;
  }
  add_pair(file, pair, images);
  if (images.size() == 0) throw IoError("{} has no picture: a pair of files such as 000.jpg and 000.cls", path);
  return images;
}

/// The highest label decides the number of classes, so one wrong label would make many classes without a picture.
void warn_of_empty_classes(const ImageSet& images) {
  std::vector<bool> has_picture(images.classes.size());
  for (const auto label : images.labels) has_picture[static_cast<size_t>(label)] = true;
  std::vector<std::string> empty;
  for (size_t label = 0; label < has_picture.size(); label++) {
    if (!has_picture[label]) empty.push_back(images.classes[label]);
  }
  if (empty.empty()) return;
  log(LogLevel::Warning, "the tar shards from {} on have {} classes, from 0 to the highest number in a .cls file, but no picture of {}",
      images.roots.front(), images.classes.size(), some_of(empty));
}

/// Returns the texts of a range such as 7..12, or 007..012 with as many digits; nothing if it is not a range.
std::optional<std::vector<std::string>> texts_of_range(std::string_view inside) {
  const auto dots = inside.find("..");
  if (dots == std::string_view::npos) return std::nullopt;
  const auto from = inside.substr(0, dots), to = inside.substr(dots + 2);
  const auto first = number_of<int64_t>(from), last = number_of<int64_t>(to);
  if (!first || !last || *first < 0 || *last < 0) return std::nullopt;
  const auto count = std::max(*first, *last) - std::min(*first, *last);
  if (count >= static_cast<int64_t>(kMostExpanded)) throw UsageError("the range {{{}}} has too many files", inside);
  const bool is_padded = (from.size() > 1 && from[0] == '0') || (to.size() > 1 && to[0] == '0');
  const auto width = is_padded ? std::max(from.size(), to.size()) : 0;
  std::vector<std::string> texts;
  for (int64_t i = 0; i <= count; i++) {
    const auto digits = std::to_string(*first < *last ? *first + i : *first - i);
    texts.push_back(std::string(width - std::min(width, digits.size()), '0') + digits);
  }
  return texts;
}

/// Returns the texts that braces stand for: a range, or the parts between the commas outside inner braces.
std::vector<std::string> texts_of(std::string_view inside) {
  if (auto range = texts_of_range(inside)) return std::move(*range);
  std::vector<std::string> texts(1);
  int depth = 0;
  for (const char letter : inside) {
    depth += letter == '{' ? 1 : letter == '}' ? -1 : 0;
    if (letter == ',' && depth == 0) {
      texts.emplace_back();
    } else {
      texts.back() += letter;
    }
  }
  if (texts.size() == 1) throw UsageError("{{{}}} is not a range such as {{000..146}}, or a list such as {{a,b}}", printable(inside));
  return texts;
}

/// Returns the place of the brace that closes the one at `open`.
size_t closing_brace(std::string_view pattern, size_t open) {
  int depth = 0;
  for (size_t i = open; i < pattern.size(); i++) {
    depth += pattern[i] == '{' ? 1 : pattern[i] == '}' ? -1 : 0;
    if (depth == 0) return i;
  }
  throw UsageError("'{}' has a brace that is not closed", printable(pattern));
}

void expand(const std::string& before, std::string_view pattern, std::vector<std::filesystem::path>& files) {
  if (files.size() >= kMostExpanded) throw UsageError("the braces stand for too many files; there are {} already", files.size());
  const auto open = pattern.find('{');
  if (open == std::string_view::npos) {
    files.emplace_back(before + std::string(pattern));
    return;
  }
  const auto close = closing_brace(pattern, open);
  const auto inside = pattern.substr(open + 1, close - open - 1);
  for (const auto& text : texts_of(inside))
    expand(before + std::string(pattern.substr(0, open)), text + std::string(pattern.substr(close + 1)), files);
}

}  // namespace

ImageSet read_tar_shards(const std::vector<std::filesystem::path>& files) {
  if (files.empty()) throw UsageError("there are no files of tar shards; name them, such as by expand_braces(\"train-{000..146}.tar\")");
  std::vector<ImageSet> shards(files.size());
  at::parallel_for(0, std::ssize(files), 1, [&](int64_t begin, int64_t end) {
    for (auto i = static_cast<size_t>(begin); i < static_cast<size_t>(end); i++) shards[i] = read_shard(files[i]);
  });
  ImageSet images{.roots = files};
  for (size_t i = 0; i < shards.size(); i++) {
    for (auto& place : shards[i].places) {
      place.root = static_cast<uint32_t>(i);
      images.places.push_back(std::move(place));
    }
    images.labels.insert(images.labels.end(), shards[i].labels.begin(), shards[i].labels.end());
    shards[i] = {};
  }
  for (int64_t label = 0; label <= std::ranges::max(images.labels); label++) images.classes.push_back(std::to_string(label));
  warn_of_empty_classes(images);
  return images;
}

std::vector<std::filesystem::path> expand_braces(std::string_view pattern) {
  std::vector<std::filesystem::path> files;
  expand("", pattern, files);
  return files;
}

}  // namespace tessera::vision
