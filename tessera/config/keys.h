// The keys of a configuration: those of Accelerate's files, by the names that they have there.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>

namespace tessera::config {

enum class Section { Top, Fsdp, Parallelism, Dynamo };
enum class Kind { Bool, Integer, Number, Text, Choice };

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

struct Key {
  std::string_view name;  // "mixed_precision", "fsdp_sharding_strategy"
  Section section = Section::Top;
  Kind kind = Kind::Text;
  std::span<const std::string_view> choices = {};  // of Kind::Choice, in the order of Accelerate's menus: 1 stands for the first one
  int64_t least = 0, most = kNoLimit;              // of Kind::Integer and Kind::Number
  std::string_view otherwise = {};                 // the value if nobody gives one
  std::string_view variable = {};                  // through which launch tells ranks; empty if only launch needs to know
  std::string_view meaning = {};                   // a sentence for help texts and docs
  std::string_view refusal = {};    // why other values than `otherwise`, or than the choices, are refused; empty if they have their effect
  std::string_view refused = {};    // the value that `refusal` is about, if it is about one
  std::string_view no_effect = {};  // why other values than `otherwise` are accepted, and change nothing
};

std::span<const Key> keys();

/// Whether one of its values changes something here.
bool has_effect(const Key& key);

/// The name that a key has today. A name that no key ever had stays as it is.
std::string_view todays_name(std::string_view name);
/// Nothing if there is no such key. Also finds a key by an older name of it.
const Key* find_key(std::string_view name);

/// The key in a file under which those of a section stand: "fsdp_config". Empty for the top.
std::string_view section_name(Section section);

/// " (did you mean fsdp_version?)"; empty if no key has a name like this one.
std::string suggestion(std::string_view name);

}  // namespace tessera::config
