#include "tessera/comm/groups/same_on_all.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
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
  for (int rank = 0; rank < world.size(); rank++) ranks_of[line_of_rank[static_cast<size_t>(rank)]].push_back(world.world_rank(rank));
  if (ranks_of.size() == 1) return {};
  std::vector<std::string> words;
  for (const auto& [line, ranks] : ranks_of) {
    auto text = line;
    std::ranges::replace(text, '\t', ' ');
    words.push_back(fmt::format("{}: {}", name_ranks(ranks), text));
  }
  return fmt::format("{}", fmt::join(words, "; "));
}

/// Of the first subject about which the texts differ, or of the first line if only the order differs.
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
  return "what they have differs";
}

}  // namespace

std::vector<std::string> texts_of_ranks(const Communicator& world, const std::string& own, const Subject& subject) {
  const auto on_device = at::TensorOptions(world.traits().device);
  const auto longest = at::full({1}, static_cast<int64_t>(own.size()), on_device.dtype(at::kLong));
  world.all_reduce(longest, {.op = Reduce::Max}, subject).wait();
  const auto row = at::zeros({longest.item<int64_t>() + 1}, at::kByte);
  own.copy(reinterpret_cast<char*>(row.mutable_data_ptr<uint8_t>()), own.size());
  const auto part = row.to(world.traits().device);
  const auto whole = at::empty({part.numel() * world.size()}, part.options());
  world.all_gather(std::array{Piece{.whole = whole, .own = part}}, subject).wait();
  const auto rows = whole.cpu();
  std::vector<std::string> texts;
  for (int rank = 0; rank < world.size(); rank++) {
    texts.emplace_back(reinterpret_cast<const char*>(rows.const_data_ptr<uint8_t>()) + rank * part.numel());
  }
  return texts;
}

bool same_on_all(const Communicator& world, uint64_t number, Subject subject) {
  // The complement has the largest value where the number has its smallest.
  const auto own = std::bit_cast<int64_t>(number);
  const auto range = at::tensor({own, ~own}, at::TensorOptions(world.traits().device).dtype(at::kLong));
  world.all_reduce(range, {.op = Reduce::Max}, subject).wait();
  return range[0].item<int64_t>() == ~range[1].item<int64_t>();
}

std::string difference_on_ranks(const Communicator& world, const std::string& lines, const Subject& subject) {
  if (same_on_all(world, std::hash<std::string>()(lines), subject)) return {};
  return first_difference(world, texts_of_ranks(world, lines, subject));
}

}  // namespace tessera
