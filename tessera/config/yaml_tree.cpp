#include "tessera/config/yaml_tree.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <fstream>
#include <ranges>
#include <regex>
#include <sstream>
#include <string_view>
#include <system_error>
#include <vector>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"

namespace tessera::config {
namespace {

constexpr uintmax_t kMostBytes = 1 << 20;
// Limits of the tree, because aliases that repeat a value can make the tree of a small file huge.
constexpr int kMostDepth = 30, kMostValues = 10'000;

constexpr std::string_view kTags = "tag:yaml.org,2002:";

/// Whether PyYAML, which Accelerate uses, chooses the type of a scalar itself: the scalar is not in quotes, or has the tag of a number.
bool is_plain(const YAML::Node& node) {
  const auto& tag = node.Tag();
  return node.IsScalar() && (tag == "?" || tag == fmt::format("{}int", kTags) || tag == fmt::format("{}float", kTags));
}

/// Throws ConfigError for a tag that asks for something else than plain values, such as !!python/name: PyYAML refuses it as well.
void expect_plain_tag(const YAML::Node& node, const std::string& where) {
  static constexpr std::array<std::string_view, 8> kKnown = {"str", "int", "float", "bool", "null", "seq", "map", "merge"};
  const std::string_view tag = node.Tag();
  if (tag.empty() || tag == "?" || tag == "!") return;
  if (tag.starts_with(kTags) && std::ranges::find(kKnown, tag.substr(kTags.size())) != kKnown.end()) return;
  const auto shown = tag.starts_with(kTags) ? fmt::format("!!{}", tag.substr(kTags.size())) : std::string(tag);
  throw ConfigError("{}: the tag {} is refused; a configuration has plain values only", where, printable(shown));
}

/// Throws ConfigError for a number that YAML 1.1 reads in another way than in decimal: 010 as 8, 1_0 as 10, and 1:30 as 90.
void expect_decimal(const std::string& text, const std::string& where) {
  static const std::regex kOthers("[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0[0-7_]+|[0-9][0-9_]*_[0-9_.]*|[0-9]+(:[0-5]?[0-9])+(\\.[0-9]*)?)");
  if (std::regex_match(text, kOthers))
    throw ConfigError("{}: {} is a number that is not written in decimal; write it in decimal, or in quotes if it is a text", where, text);
}

class TreeMaker {
 public:
  explicit TreeMaker(std::string file) : file_(std::move(file)) {}

  std::string place(const YAML::Mark& mark) const { return fmt::format("{}:{}", file_, mark.line + 1); }

  YamlValue make(const YAML::Node& node, int depth = 0) {
    if (depth > kMostDepth || ++values_ > kMostValues) throw ConfigError("{} holds too much for a configuration", file_);
    YamlValue value{.where = place(node.Mark())};
    expect_plain_tag(node, value.where);
    if (std::ranges::any_of(around_, [&](const YAML::Node& other) { return other.is(node); }))
      throw ConfigError("{}: a value contains itself", value.where);
    around_.push_back(node);
    switch (node.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        value.shape = YamlValue::Shape::Scalar;
        value.text = node.Scalar();
        if (is_plain(node)) expect_decimal(value.text, value.where);
        break;
      case YAML::NodeType::Sequence:
        value.shape = YamlValue::Shape::List;
        for (const auto& each : node) value.values.push_back(make(each, depth + 1));
        break;
      case YAML::NodeType::Map:
        value.shape = YamlValue::Shape::Map;
        for (const auto& each : node) {
          if (!is_merge_key(each.first)) add(value, each.first, make(each.second, depth + 1));
        }
        merge(value, node, depth);
        break;
    }
    around_.pop_back();
    return value;
  }

 private:
  static bool is_merge_key(const YAML::Node& name) { return is_plain(name) && name.Scalar() == "<<"; }

  /// Adds the entries of the maps that << keys give, except entries whose names the map has itself.
  void merge(YamlValue& map, const YAML::Node& node, int depth) {
    std::vector<YamlValue> others;
    for (const auto& each : node) {
      if (is_merge_key(each.first)) others.push_back(make(each.second, depth + 1));
    }
    for (const auto& other : others | std::views::reverse) {  // of several << the last one wins, but in a list of maps the first one
      if (other.shape == YamlValue::Shape::List && std::ranges::all_of(other.values, &YamlValue::is_map)) {
        for (const auto& each : other.values) take_over(map, each);
      } else if (other.is_map()) {
        take_over(map, other);
      } else {
        throw ConfigError("{}: << needs a map or a list of maps", other.where);
      }
    }
  }

  static void take_over(YamlValue& map, const YamlValue& other) {
    for (size_t i = 0; i < other.names.size(); i++) {
      if (map.find(other.names[i]) != nullptr) continue;
      map.names.push_back(other.names[i]);
      map.values.push_back(other.values[i]);
    }
  }

  void add(YamlValue& map, const YAML::Node& name, YamlValue value) const {
    const auto where = place(name.Mark());
    if (!name.IsScalar()) throw ConfigError("{}: a key is not a text", where);
    if (map.find(name.Scalar()) != nullptr) throw ConfigError("{}: the key '{}' is there twice", where, printable(name.Scalar()));
    value.where = where;
    map.names.push_back(name.Scalar());
    map.values.push_back(std::move(value));
  }

  std::string file_;
  int values_ = 0;
  std::vector<YAML::Node> around_;  // the nodes that contain the value that is being made, outermost first
};

struct Ignored : YAML::EventHandler {
  void OnDocumentStart(const YAML::Mark&) override {}
  void OnDocumentEnd() override {}
  void OnNull(const YAML::Mark&, YAML::anchor_t) override {}
  void OnAlias(const YAML::Mark&, YAML::anchor_t) override {}
  void OnScalar(const YAML::Mark&, const std::string&, YAML::anchor_t, const std::string&) override {}
  void OnSequenceStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnSequenceEnd() override {}
  void OnMapStart(const YAML::Mark&, const std::string&, YAML::anchor_t, YAML::EmitterStyle::value) override {}
  void OnMapEnd() override {}
};

/// Whether anything follows the first document. Does not use YAML::LoadAll, which never returns for some files that are not YAML.
bool has_more_documents(const std::string& text) {
  std::istringstream stream(text);
  YAML::Parser parser(stream);
  Ignored ignored;
  return parser.HandleNextDocument(ignored) && parser.HandleNextDocument(ignored);
}

std::string read_small_file(const std::filesystem::path& file) {
  errno = 0;
  std::ifstream stream(file, std::ios::binary);
  std::error_code failure;
  const bool is_folder = std::filesystem::is_directory(file, failure);
  if (!stream || is_folder) {
    throw IoError("the configuration {} can't be read: {}", file, why_not_opened(file, is_folder ? EISDIR : errno));
  }
  std::string text(kMostBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kMostBytes) throw ConfigError("{} is too large for a configuration", file);
  return text;
}

/// Returns " (a tab indents line 3; ...)" if a tab indents a line near `line` (counted from 0), at which reading failed; otherwise an empty
/// text.
std::string word_of_tabs(const std::string& text, int line) {
  std::istringstream lines(text);
  std::string each;
  for (int number = 0; std::getline(lines, each) && number <= line + 1; number++) {
    const auto indentation = each.substr(0, each.find_first_not_of(" \t"));
    if (number >= line - 1 && indentation.find('\t') != std::string::npos)
      return fmt::format(" (a tab indents line {}; YAML allows only spaces there)", number + 1);
  }
  return {};
}

}  // namespace

const YamlValue* YamlValue::find(std::string_view name) const {
  const auto found = std::ranges::find(names, name);
  return found == names.end() ? nullptr : &values[static_cast<size_t>(found - names.begin())];
}

YamlValue read_yaml(const std::filesystem::path& file) {
  const auto text = read_small_file(file);
  TreeMaker maker(file.string());
  try {
    if (has_more_documents(text)) throw ConfigError("{} holds more than one document; a configuration is one", file);
    return maker.make(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    throw ConfigError("{} is neither YAML nor JSON: {}{}", maker.place(error.mark), printable(error.msg), word_of_tabs(text, error.mark.line));
  }
}

}  // namespace tessera::config
