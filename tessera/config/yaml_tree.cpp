#include "tessera/config/yaml_tree.h"

#include <fmt/format.h>
#include <yaml-cpp/eventhandler.h>
#include <yaml-cpp/yaml.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <sstream>
#include <system_error>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::config {
namespace {

constexpr uintmax_t kMostBytes = 1 << 20;
// References to the same value can make a small file endless.
constexpr int kMostDepth = 30, kMostValues = 10'000;

class TreeMaker {
 public:
  explicit TreeMaker(std::string file) : file_(std::move(file)) {}

  std::string place(const YAML::Mark& mark) const { return fmt::format("{}:{}", file_, mark.line + 1); }

  YamlValue make(const YAML::Node& node, int depth = 0) {
    if (depth > kMostDepth || ++values_ > kMostValues) throw ConfigError(fmt::format("{} holds too much for a configuration", file_));
    YamlValue value{.where = place(node.Mark())};
    switch (node.Type()) {
      case YAML::NodeType::Undefined:
      case YAML::NodeType::Null:
        break;
      case YAML::NodeType::Scalar:
        value.shape = YamlValue::Shape::Scalar;
        value.text = node.Scalar();
        break;
      case YAML::NodeType::Sequence:
        value.shape = YamlValue::Shape::List;
        for (const auto& each : node) value.values.push_back(make(each, depth + 1));
        break;
      case YAML::NodeType::Map:
        value.shape = YamlValue::Shape::Map;
        for (const auto& each : node) add(value, each.first, make(each.second, depth + 1));
        break;
    }
    return value;
  }

 private:
  void add(YamlValue& map, const YAML::Node& name, YamlValue value) const {
    const auto where = place(name.Mark());
    if (!name.IsScalar()) throw ConfigError(fmt::format("{}: a key is not a text", where));
    if (map.find(name.Scalar()) != nullptr)
      throw ConfigError(fmt::format("{}: the key '{}' is there twice", where, printable(name.Scalar())));
    value.where = where;
    map.names.push_back(name.Scalar());
    map.values.push_back(std::move(value));
  }

  std::string file_;
  int values_ = 0;
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

/// Whether anything follows the first document. YAML::LoadAll would tell, too, but never ends for some files that are no YAML.
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
    throw IoError(fmt::format("the configuration {} can't be read: {}", file.string(), std::strerror(is_folder ? EISDIR : errno)));
  }
  std::string text(kMostBytes + 1, '\0');
  stream.read(text.data(), static_cast<std::streamsize>(text.size()));
  text.resize(static_cast<size_t>(stream.gcount()));
  if (text.size() > kMostBytes) throw ConfigError(fmt::format("{} is too large for a configuration", file.string()));
  return text;
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
    if (has_more_documents(text)) throw ConfigError(fmt::format("{} holds more than one document; a configuration is one", file.string()));
    return maker.make(YAML::Load(text));
  } catch (const YAML::Exception& error) {
    throw ConfigError(fmt::format("{} is no YAML or JSON: {}", maker.place(error.mark), printable(error.msg)));
  }
}

}  // namespace tessera::config
