#include "tessera/data/added_tokens.h"

#include <algorithm>

#include "tessera/data/unicode.h"

namespace tessera::data {
namespace {

bool stands_alone(std::string_view text, size_t begin, size_t end) {
  const bool word_before = begin > 0 && is_word(first_character(text.substr(last_character(text.substr(0, begin)))));
  const bool word_behind = end < text.size() && is_word(first_character(text.substr(end)));
  return !word_before && !word_behind;
}

}  // namespace

AddedTokens::AddedTokens(std::vector<AddedToken> tokens) {
  for (auto& token : tokens) {
    if (token.content.empty()) continue;
    auto& same = by_first_byte_[static_cast<uint8_t>(token.content[0])];
    same.push_back(std::move(token));
    any_ = true;
  }
  for (auto& same : by_first_byte_)
    std::ranges::stable_sort(same, std::greater{}, [](const AddedToken& each) { return each.content.size(); });
}

const AddedToken* AddedTokens::longest_at(std::string_view text) const {
  for (const auto& token : by_first_byte_[static_cast<uint8_t>(text[0])]) {
    if (text.starts_with(token.content)) return &token;
  }
  return nullptr;
}

void AddedTokens::cut(std::string_view text, c10::function_ref<void(std::string_view piece, int32_t id)> take) const {
  if (!any_) return take(text, -1);
  size_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const auto* token = may_begin_with(text[at]) ? longest_at(text.substr(at)) : nullptr;
    if (token == nullptr) {
      at++;
      continue;
    }
    auto begin = at, end = at + token->content.size();
    at = end;
    if (token->single_word && !stands_alone(text, begin, end)) continue;
    while (token->lstrip && begin > done && is_white(first_character(text.substr(last_character(text.substr(0, begin))))))
      begin = last_character(text.substr(0, begin));
    while (token->rstrip && end < text.size() && is_white(first_character(text.substr(end)))) end += length_of_first(text.substr(end));
    if (begin > done) take(text.substr(done, begin - done), -1);
    take(text.substr(begin, end - begin), token->id);
    done = end;
    at = std::max(at, done);
  }
  if (done < text.size()) take(text.substr(done), -1);
}

}  // namespace tessera::data
