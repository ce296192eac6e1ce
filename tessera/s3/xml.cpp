#include "tessera/s3/xml.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <utility>

namespace tessera::s3 {
namespace {

/// Replaces the five entities of XML, and numbers of ASCII characters.
std::string unescaped(std::string_view text) {
  constexpr std::array<std::pair<std::string_view, char>, 5> kEntities = {
      {{"amp", '&'}, {"lt", '<'}, {"gt", '>'}, {"quot", '"'}, {"apos", '\''}}};
  std::string plain;
  while (!text.empty()) {
    const auto end = text.front() == '&' ? text.find(';') : std::string_view::npos;
    char letter = text.front();
    size_t taken = 1;
    if (end != std::string_view::npos) {
      const auto name = text.substr(1, end - 1);
      const auto* const known = std::ranges::find(kEntities, name, [](const auto& each) { return each.first; });
      const bool is_hex = name.starts_with("#x");
      const auto digits = std::string(name.substr(std::min(name.size(), size_t{is_hex ? 2U : 1U})));
      const auto number = name.starts_with('#') ? std::strtol(digits.c_str(), nullptr, is_hex ? 16 : 10) : 0;
      if (known != kEntities.end()) letter = known->second;
      if (number > 0 && number < 128) letter = static_cast<char>(number);
      if (known != kEntities.end() || (number > 0 && number < 128)) taken = end + 1;
    }
    plain += letter;
    text.remove_prefix(taken);
  }
  return plain;
}

}  // namespace

std::vector<std::string> xml_texts(std::string_view xml, std::string_view name) {
  const auto open = fmt::format("<{}>", name), close = fmt::format("</{}>", name);
  std::vector<std::string> texts;
  for (size_t at = 0; (at = xml.find(open, at)) != std::string_view::npos;) {
    at += open.size();
    const auto end = xml.find(close, at);
    if (end == std::string_view::npos) break;
    texts.push_back(unescaped(xml.substr(at, end - at)));
    at = end;
  }
  return texts;
}

std::string xml_text(std::string_view xml, std::string_view name) {
  const auto texts = xml_texts(xml, name);
  return texts.empty() ? "" : texts.front();
}

}  // namespace tessera::s3
