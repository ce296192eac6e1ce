#include "tessera/checkpoint/formats/pickle/pickle.h"

#include <algorithm>

namespace tessera::checkpoint::pickle {

std::string_view Value::kind() const {
  constexpr std::string_view kKinds[] = {"None",    "a bool", "an integer",     "a number",  "a text",    "bytes",   "a list",
                                         "a tuple", "a dict", "a class's name", "an object", "a storage", "a tensor"};
  static_assert(std::size(kKinds) == std::variant_size_v<decltype(part_)>);
  return kKinds[part_.index()];
}

const std::vector<Value>* Value::items() const {
  const auto* const list = as<List>();
  const auto* const tuple = as<Tuple>();
  return list != nullptr ? &list->items : tuple != nullptr ? &tuple->items : nullptr;
}

const std::vector<std::pair<Value, Value>>& Value::entries() const {
  static const Dict kEmpty;
  const auto* const dict = as<Dict>();
  return (dict == nullptr ? kEmpty : *dict).entries;
}

const Value& Value::operator[](std::string_view key) const {
  static const Value kNone;
  const auto* const dict = as<Dict>();
  const auto* const found = dict == nullptr ? nullptr : dict->find(key);
  return found == nullptr ? kNone : *found;
}

const Value& Value::operator[](size_t place) const {
  static const Value kNone;
  const auto* const object = as<Object>();
  const auto* const all = object == nullptr ? items() : &object->arguments;
  return all == nullptr || place >= all->size() ? kNone : (*all)[place];
}

const Value* Dict::find(std::string_view key) const {
  const auto found = std::ranges::find_if(entries, [&](const auto& entry) {
    const auto* const text = entry.first.template as<std::string>();
    return text != nullptr && *text == key;
  });
  return found == entries.end() ? nullptr : &found->second;
}

std::string to_latin1(std::string_view bytes) {
  std::string text;
  for (const auto byte : bytes) {
    const auto letter = static_cast<unsigned char>(byte);
    if (letter >= 0x80) text += static_cast<char>(0xc0 | letter >> 6);
    text += static_cast<char>(letter >= 0x80 ? 0x80 | (letter & 0x3f) : letter);
  }
  return text;
}

std::optional<std::string> from_latin1(std::string_view text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); i++) {
    auto letter = static_cast<unsigned char>(text[i]);
    if (letter > 0xc3 || (letter >= 0x80 && i + 1 == text.size())) return std::nullopt;
    if (letter >= 0x80) letter = static_cast<unsigned char>(letter << 6 | (text[++i] & 0x3f));
    bytes += static_cast<char>(letter);
  }
  return bytes;
}

}  // namespace tessera::checkpoint::pickle
