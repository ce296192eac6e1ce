#include "tessera/checkpoint/formats/pickle/pickle.h"

#include <algorithm>

namespace tessera::checkpoint::pickle {

Value::Value(std::string text) : value_(std::make_shared<std::string>(std::move(text))) {}
Value::Value(Bytes bytes) : value_(std::make_shared<Bytes>(std::move(bytes))) {}
Value::Value(List list) : value_(std::make_shared<List>(std::move(list))) {}
Value::Value(Tuple tuple) : value_(std::make_shared<Tuple>(std::move(tuple))) {}
Value::Value(Dict dict) : value_(std::make_shared<Dict>(std::move(dict))) {}
Value::Value(Global global) : value_(std::make_shared<Global>(std::move(global))) {}
Value::Value(Object object) : value_(std::make_shared<Object>(std::move(object))) {}
Value::Value(Storage storage) : value_(std::make_shared<Storage>(std::move(storage))) {}

std::string_view Value::kind() const {
  constexpr std::string_view kKinds[] = {"None",   "a bool",  "an integer", "a number",       "a text",    "bytes",
                                         "a list", "a tuple", "a dict",     "a class's name", "an object", "a storage"};
  static_assert(std::size(kKinds) == std::variant_size_v<decltype(value_)>);
  return kKinds[value_.index()];
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
