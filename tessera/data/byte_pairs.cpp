#include "tessera/data/byte_pairs.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <queue>

namespace tessera::data {
namespace {

constexpr size_t kShort = 48;  // tokens; up to this number, merge_short() is faster than merge_long()
constexpr uint32_t kNoRank = std::numeric_limits<uint32_t>::max();

}  // namespace

BytePairs::BytePairs(std::span<const int32_t, 256> of_bytes, std::span<const Merge> merges) {
  std::ranges::copy(of_bytes, of_bytes_);
  const auto size = std::bit_ceil(std::max<size_t>(2 * merges.size(), 16));
  shift_ = 64 - std::countr_zero(size);
  pairs_.resize(size);
  for (const auto& [left, right, merged, rank] : merges) {
    const auto key = key_of(left, right);
    auto place = place_of(key);
    while (pairs_[place].key != kNone && pairs_[place].key != key) place = (place + 1) & (size - 1);
    pairs_[place] = {key, rank, merged};
  }
}

const BytePairs::Pair* BytePairs::find(int32_t left, int32_t right) const {
  const auto key = key_of(left, right);
  for (auto place = place_of(key);; place = (place + 1) & (pairs_.size() - 1)) {
    const auto& pair = pairs_[place];
    if (pair.key == key) return &pair;
    if (pair.key == kNone) return nullptr;
  }
}

void BytePairs::encode(std::string_view word, std::vector<int32_t>& tokens) const {
  const auto begin = tokens.size();
  for (const auto byte : word) {
    const auto token = of_bytes_[static_cast<uint8_t>(byte)];
    if (token != kLeftOut) tokens.push_back(token);
  }
  merge(tokens, begin);
}

void BytePairs::merge(std::vector<int32_t>& tokens, size_t begin) const {
  const auto parts = std::span(tokens).subspan(begin);
  if (parts.size() > 1) tokens.resize(begin + (parts.size() <= kShort ? merge_short(parts) : merge_long(parts)));
}

size_t BytePairs::merge_short(std::span<int32_t> parts) const {
  int32_t merged[kShort];
  uint32_t ranks[kShort];  // ranks[i]: the rank of the merge of parts i and i + 1, or kNoRank
  auto count = parts.size();
  const auto look = [&](size_t i) {
    const auto* pair = find(parts[i], parts[i + 1]);
    ranks[i] = pair == nullptr ? kNoRank : pair->rank;
    if (pair != nullptr) merged[i] = pair->merged;
  };
  for (size_t i = 0; i + 1 < count; i++) look(i);
  while (count > 1) {
    size_t best = 0;
    for (size_t i = 1; i + 1 < count; i++) {
      if (ranks[i] < ranks[best]) best = i;
    }
    if (ranks[best] == kNoRank) break;
    parts[best] = merged[best];
    for (auto i = best + 1; i + 1 < count; i++) {
      parts[i] = parts[i + 1];
      ranks[i] = ranks[i + 1];
      merged[i] = merged[i + 1];
    }
    count--;
    if (best > 0) look(best - 1);
    if (best + 1 < count) look(best);
  }
  return count;
}

size_t BytePairs::merge_long(std::span<int32_t> tokens) const {
  struct Part {
    int32_t token;
    int32_t before, next;  // the neighbouring parts, -1 at the ends; a part that was merged into another has the token -1
  };
  struct Candidate {
    uint32_t rank;
    int32_t at;
    int32_t left, right, merged;  // tokens when the pair was found; later merges may have changed them
    bool operator<(const Candidate& other) const { return rank != other.rank ? rank > other.rank : at > other.at; }  // lowest rank on top
  };
  std::vector<Part> parts(tokens.size());
  for (size_t i = 0; i < tokens.size(); i++) {
    const auto at = static_cast<int32_t>(i);
    parts[i] = {tokens[i], at - 1, i + 1 < tokens.size() ? at + 1 : -1};
  }
  std::vector<Candidate> found;
  const auto candidate_at = [&](int32_t at) -> const Pair* {
    const auto next = parts[static_cast<size_t>(at)].next;
    return next < 0 ? nullptr : find(parts[static_cast<size_t>(at)].token, parts[static_cast<size_t>(next)].token);
  };
  const auto made = [&](int32_t at, const Pair& pair) {
    return Candidate{pair.rank, at, static_cast<int32_t>(pair.key >> 32), static_cast<int32_t>(pair.key & 0xFFFFFFFF), pair.merged};
  };
  for (int32_t at = 0; at < static_cast<int32_t>(parts.size()); at++) {
    if (const auto* pair = candidate_at(at)) found.push_back(made(at, *pair));
  }
  std::priority_queue<Candidate> queue(std::less<Candidate>(), std::move(found));
  while (!queue.empty()) {
    const auto best = queue.top();
    queue.pop();
    auto& part = parts[static_cast<size_t>(best.at)];
    if (part.token != best.left || part.next < 0 || parts[static_cast<size_t>(part.next)].token != best.right)
      continue;  // a later merge has changed one of the two tokens
    auto& next = parts[static_cast<size_t>(part.next)];
    part.token = best.merged;
    part.next = next.next;
    next.token = -1;
    if (part.next >= 0) parts[static_cast<size_t>(part.next)].before = best.at;
    if (const auto* pair = candidate_at(best.at)) queue.push(made(best.at, *pair));
    if (part.before >= 0) {
      if (const auto* pair = candidate_at(part.before)) queue.push(made(part.before, *pair));
    }
  }
  size_t count = 0;
  for (int32_t at = 0; at >= 0; at = parts[static_cast<size_t>(at)].next) tokens[count++] = parts[static_cast<size_t>(at)].token;
  return count;
}

}  // namespace tessera::data
