// Reads and writes config.json of a Hugging Face folder, with errors that name the file and the key.
#pragma once

#include <ATen/core/ScalarType.h>
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/input_file.h"

namespace tessera::models {

using Json = nlohmann::ordered_json;

constexpr auto kConfigFile = "config.json";
inline constexpr int64_t kLargestSize = int64_t{1} << 28;  // of a model in each direction, so that no number of bytes overflows

inline const char* name_in_config(at::ScalarType dtype) {
  return dtype == at::kBFloat16 ? "bfloat16" : dtype == at::kHalf ? "float16" : "float32";
}

/// The whole file, or an object in it. `prefix` names that object in errors.
struct ConfigFile {
  std::filesystem::path path;
  Json json;
  std::string prefix = {};

  /// Throws IoError if the folder's config.json can't be read or holds no object.
  static ConfigFile open(const std::filesystem::path& folder) {
    ConfigFile file{.path = folder / kConfigFile, .json = {}};
    file.json = Json::parse(InputFile(file.path).read_all(), nullptr, /*allow_exceptions=*/false);
    if (!file.json.is_object()) throw IoError("{} is damaged: it is not a JSON object", file.path);
    return file;
  }

  [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
    const auto found = json.find(key);
    const auto value = found == json.end() ? std::string("missing") : found->dump();
    throw ConfigError("{}: {}{}: {}: {}", path, prefix, key, value, why);
  }

  /// Returns the value of a key, or nullptr if it is missing or null.
  const Json* find(const std::string& key) const {
    const auto found = json.find(key);
    return found == json.end() || found->is_null() ? nullptr : &*found;
  }

  template <class T>
  void read(const std::string& key, T& member) const {
    const auto found = json.find(key);
    if (found == json.end()) return;
    if constexpr (std::is_same_v<T, bool>) {
      if (!found->is_boolean()) refuse(key, "this must be true or false");
    } else if constexpr (std::is_same_v<T, std::string>) {
      if (!found->is_string()) refuse(key, "this must be a text");
    } else if constexpr (std::is_integral_v<T>) {
      if (!found->is_number_integer()) refuse(key, "this must be an integer");
    } else {
      if (!found->is_number()) refuse(key, "this must be a number");
    }
    found->get_to(member);
  }
  template <class T>
  void read(const std::string& key, std::optional<T>& member) const {
    const auto found = json.find(key);
    if (found == json.end()) return;
    member.reset();
    if (!found->is_null()) read(key, member.emplace());
  }

  template <class T>
  void read(const std::string& key, std::vector<T>& members) const {
    const auto* const found = find(key);
    if (found == nullptr) return;
    constexpr auto kOf = std::is_same_v<T, std::string> ? "texts" : std::is_integral_v<T> ? "integers" : "numbers";
    const auto fits = [](const Json& each) {
      return std::is_same_v<T, std::string> ? each.is_string() : std::is_integral_v<T> ? each.is_number_integer() : each.is_number();
    };
    if (!found->is_array() || !std::ranges::all_of(*found, fits)) refuse(key, fmt::format("this must be a list of {}", kOf));
    found->get_to(members);
  }

  /// Throws ConfigError if the file has another value for the key, which would make it another model.
  void expect(const std::string& key, const Json& value, const std::string& models) const {
    const auto found = json.find(key);
    if (found != json.end() && *found != value) refuse(key, fmt::format("{} knows only {}", models, value.dump()));
  }

  /// Throws the error of expect_sense(), with the file's name before it.
  void expect_sensible(const auto& config) const try { expect_sense(config); } catch (const ConfigError& error) {
    throw ConfigError("{}: {}", path, error.what());
  }

  static void write(const std::filesystem::path& folder, const Json& json) {
    make_folder(folder);
    write_text(folder / kConfigFile, json.dump(2) + "\n");
  }
};

}  // namespace tessera::models
