#include "tessera/comm/groups/same_on_all.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <functional>
#include <map>
#include <vector>

#include "tessera/base/words.h"

namespace tessera {
namespace {

std::vector<std::string> lines_of(const std::string& text) {
  std::vector<std::string> lines;
  for (size_t begin = 0, end; (end = text.find('\n', begin)) != std::string::npos; begin = end + 1)
    lines.push_back(text.substr(begin, end - begin));
  return lines;
}

/// "rank 0: ...; ranks 1 and 2: ..." if the ranks have different lines.
std::string difference(const Communicator& world, const std::vector<std::string>& line_of_rank) {
  std::map<std::string, std::vector<int>> ranks_of;
  for (int rank = 0; rank < world.size(); rank++) ranks_of[line_of_rank[rank]].push_back(world.world_rank(rank));
  if (ranks_of.size() == 1) return {};
  std::vector<std::string> words;
  for (const auto& [line, ranks] : ranks_of) {
    auto text = line;
    std::ranges::replace(text, '\t', ' ');
    words.push_back(fmt::format("{}: {}", name_ranks(ranks), text));
  }
  return fmt::format("{}", fmt::join(words, "; "));
}

/// The difference in the first subject about which the texts differ, or in the first line if only the order differs.
std::string first_difference(const Communicator& world, const std::vector<std::string>& texts) {
  std::vector<std::vector<std::string>> lines;
  for (const auto& text : texts) lines.push_back(lines_of(text));
  for (const auto& own : lines) {
    for (const auto& line : own) {
      const auto subject = line.substr(0, line.find('\t') + 1);
      std::vector<std::string> found;
      for (const auto& other : lines) {
        const auto same = std::ranges::find_if(other, [&](const std::string& each) { return each.starts_with(subject); });
        found.push_back(same == other.end() ? "no " + subject.substr(0, subject.size() - 1) : *same);
      }
      if (auto words = difference(world, found); !words.empty()) return words;
    }
  }
  for (size_t i = 0; i < lines.front().size(); i++) {
    std::vector<std::string> found;
    for (const auto& own : lines) found.push_back(i < own.size() ? own[i] : "nothing more");
    if (auto words = difference(world, found); !words.empty()) return words;
  }
  return "their texts differ";
}

}  // namespace

bool same_on_all(const Communicator& world, uint64_t number, Subject subject) {
  return world.extremes(number, subject).are_one();
}

std::string difference_on_ranks(const Communicator& world, const std::string& lines, const Subject& subject) {
  if (same_on_all(world, std::hash<std::string>()(lines), subject)) return {};
  return first_difference(world, world.texts(lines, subject));
}

}  // namespace tessera
