#include "tessera/base/words.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

namespace tessera {

std::string name_ranks(std::span<const int> ranks) {
  std::string result = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); i++) {
    if (i > 0) result += i + 1 == ranks.size() ? " and " : ", ";
    result += fmt::format("{}", ranks[i]);
  }
  return result;
}

std::string some_of(const std::vector<std::string>& names) {
  constexpr size_t kMostNames = 5;
  const auto shown = std::min(names.size(), kMostNames);
  const auto text = fmt::format("'{}'", fmt::join(names.begin(), names.begin() + static_cast<std::ptrdiff_t>(shown), "', '"));
  return shown == names.size() ? text : fmt::format("{} and {} more", text, names.size() - shown);
}

}  // namespace tessera
