// Reads files of Accelerate, also those that its older versions wrote.
#include <fmt/format.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/config/file_entries.h"
#include "tessera/config/settings.h"
#include "tessera/config/value.h"

namespace tessera::config {
namespace {

using Shape = YamlValue::Shape;

/// Returns the text of a value; joins the parts of a list with commas. For a refused key, an empty section counts as an empty text.
std::string text_of(const Key& key, const YamlValue& value) {
  if (value.shape == Shape::Scalar) return value.text;
  if (key.kind != Kind::Text || (value.shape == Shape::Map && key.effect != Effect::Refused)) {
    throw ConfigError("{}: {} has several values, but has to be {}", value.where, key.name, describe_values(key));
  }
  if (value.shape == Shape::Map) return value.values.empty() ? "" : "{...}";
  std::string text;
  for (const auto& each : value.values) {
    if (each.shape != Shape::Scalar) throw ConfigError("{}: {} is not a list of texts", value.where, key.name);
    if (each.text.find(',') != std::string::npos)
      throw ConfigError("{}: '{}' in the list {} has a comma, which would end it", each.where, printable(each.text), key.name);
    text += (text.empty() ? "" : ",") + each.text;
  }
  return text;
}

class AccelerateFile {
 public:
  explicit AccelerateFile(const YamlValue& root) : root_(root) {}

  FileEntries read() {
    // Checks compute_environment first: a file for SageMaker has many keys of its own, and the error for this key says why they are
    // refused.
    const auto* place = root_.find("compute_environment");
    if (place != nullptr && place->shape != Shape::Null) Settings().set("compute_environment", place->text, Origin::File, place->where);
    for (size_t i = 0; i < root_.names.size(); i++) read_top(root_.names[i], root_.values[i]);
    remark_unused_sections();
    return std::move(result_);
  }

 private:
  void read_top(const std::string& name, const YamlValue& value) {
    for (const auto section : kSections) {
      if (name == section_name(section)) return read_section(section, value);
    }
    if (name == "deepspeed_config") return read_deepspeed(value);
    if (name == "fp16") return read_fp16(value);
    if (name == "distributed_type" && is_for_deepspeed()) return result_.add(name, "FSDP", value.where);
    if (name == "num_processes" && (value.text == "-1" || value.shape == Shape::Null)) {
      const auto* const shown = value.text.empty() ? "without a value" : "-1";
      result_.remark(value.where, fmt::format("num_processes {} leaves the number to the command line", shown));
      return;
    }
    const auto* key = find_key(name);
    if (key != nullptr && key->section != Section::Top && name != "dynamo_backend") expect_lost_indentation(*key, value);
    add(name, value);
  }

  /// Allows a key of a section at the top if the section is there and empty: a file copied from a page may have lost its indentation.
  void expect_lost_indentation(const Key& key, const YamlValue& value) const {
    const auto name = section_name(key.section);
    const auto* section = root_.find(name);
    if (section == nullptr || !section->is_empty()) throw ConfigError("{}: {} belongs under {}", value.where, key.name, name);
  }

  void read_section(Section section, const YamlValue& value) {
    if (value.shape != Shape::Map && !value.is_empty()) {
      throw ConfigError("{}: {} is not a section of keys", value.where, section_name(section));
    }
    const auto prefix = section_prefix(section);
    for (size_t i = 0; i < value.names.size(); i++) {
      const auto& name = value.names[i];
      const auto full = name.starts_with(prefix) ? name : std::string(prefix) + name;
      const auto* key = find_key(full);
      if (key != nullptr && key->section != section) {
        throw ConfigError("{}: {} does not belong under {}", value.values[i].where, name, section_name(section));
      }
      if (key == nullptr) refuse(name, full, value.values[i]);
      add(full, value.values[i]);
    }
  }

  /// Throws ConfigError because there is no key `name`. `full` is the name with the prefix of the section.
  [[noreturn]] static void refuse(const std::string& name, const std::string& full, const YamlValue& value) {
    const auto elsewhere = places_of(name);
    throw ConfigError("{}: there is no key '{}'{}", value.where, printable(name), elsewhere.empty() ? suggestion(full) : elsewhere);
  }

  void add(const std::string& name, const YamlValue& value) {
    const auto* key = find_key(name);
    if (key == nullptr) refuse(name, name, value);
    const auto is_same = [&](const FileEntry& entry) { return entry.key == key->name; };
    const auto other = std::ranges::find_if(result_.entries, is_same);
    if (other != result_.entries.end()) throw ConfigError("{}: {} is there already: {}", value.where, name, other->where);
    if (value.shape != Shape::Null) result_.add(key->name, text_of(*key, value), value.where);
  }

  void read_fp16(const YamlValue& value) {
    const auto is_fp16 = to_bool(value.text);
    if (!is_fp16) throw ConfigError("{}: fp16 '{}' is not true or false", value.where, printable(value.text));
    if (root_.find("mixed_precision") == nullptr) result_.add("mixed_precision", *is_fp16 ? "fp16" : "no", value.where);
  }

  bool is_for_deepspeed() const {
    const auto* type = root_.find("distributed_type");
    return type != nullptr && type->text == "DEEPSPEED";
  }

  void read_deepspeed(const YamlValue& value) {
    if (value.is_empty()) return;
    if (!is_for_deepspeed()) return read_shared(value);
    auto found = deepspeed_section_entries(value);
    std::ranges::move(found.remarks, std::back_inserter(result_.remarks));
    // Keys at the top of the file win over the section deepspeed_config, because they are meant for all kinds of training.
    for (auto& entry : found.entries) {
      if (root_.find(entry.key) == nullptr) result_.entries.push_back(std::move(entry));
    }
  }

  void read_shared(const YamlValue& section) {
    for (size_t i = 0; i < section.names.size(); i++) {
      const auto &name = section.names[i], &where = section.values[i].where;
      if (const auto* key = find_key(name); key != nullptr && key->is_of_deepspeed && section.values[i].text != "auto") {
        add(name, section.values[i]);
      } else {
        result_.remark(where, fmt::format("{} of deepspeed_config has no effect: distributed_type is not DEEPSPEED", printable(name)));
      }
    }
  }

  void remark_unused_sections() {
    const auto* type = root_.find("distributed_type");
    const auto* fsdp = root_.find(section_name(Section::Fsdp));
    if (type == nullptr || fsdp == nullptr || fsdp->is_empty() || type->text == "FSDP") return;
    result_.remark(fsdp->where, fmt::format("fsdp_config shards nothing: distributed_type is {}; write FSDP there", printable(type->text)));
  }

  const YamlValue& root_;
  FileEntries result_;
};

}  // namespace

FileEntries accelerate_entries(const YamlValue& root) {
  return AccelerateFile(root).read();
}

bool is_deepspeed_file(const std::filesystem::path& file) {
  const auto root = read_yaml(file);
  return root.shape == Shape::Map && is_deepspeed(root);
}

void Settings::read_file(const std::filesystem::path& file) {
  const auto root = read_yaml(file);
  if (root.shape != Shape::Map || root.values.empty()) throw ConfigError("{} has no keys", file);
  const auto found = is_deepspeed(root) ? deepspeed_entries(root) : accelerate_entries(root);
  for (const auto& entry : found.entries) set(entry.key, entry.value, Origin::File, entry.where);
  for (const auto& remark : found.remarks) add_remark(remark);
}

}  // namespace tessera::config
