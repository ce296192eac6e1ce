// The keys of a configuration: those of Accelerate's files, by the names that they have there, and Tessera's own.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace tessera::config {

enum class Section { Top, Fsdp, Tessera, Parallelism, Dynamo };
enum class Kind { Text, Bool, Integer, Number, Choice };

/// The effect of values other than the default.
enum class Effect {
  Own,      // they change something
  None,     // they are accepted, and change nothing
  Refused,  // they are errors
};

inline constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

/// The function of the library that has an option for the key: init, adapt or fully_shard. If it throws, the error also names the given keys
/// of that function.
enum class Call { None, Init, Adapt, Shard };

/// The value that the key `other` must have if this key differs from its default.
struct Need {
  std::string_view other, value;
};

/// A value of this key that contradicts a value of the key `other`. An empty value means any value but the default.
struct Contradiction {
  std::string_view value, other, other_value = {};
};

/// A key, with everything that files, variables, flags, the questions of `tessera config`, pages and errors need.
struct Key {
  std::string_view name;                       // "mixed_precision", "fsdp_sharding_strategy"
  std::string_view otherwise = {};             // the default
  std::string_view meaning = {};               // a sentence for help texts and docs; empty for keys without effect
  std::string_view question = {};              // the question of `tessera config`; empty if it does not ask for this key
  std::vector<std::string_view> choices = {};  // the values of Kind::Choice, in the order of Accelerate's menus, in which 1 is the first
  std::string variable = {};                   // the variable by which launch passes the value to ranks; empty if only launch needs the key
  std::string_view flag = {};                  // another name of the key's flag, from torchrun or from an older version: "--nnodes"
  std::string_view answer = {};                // the value of an empty answer to the question; the default unless given
  std::vector<std::string_view> labels = {};   // menu texts of the first choices; the menu omits other choices; if empty, `choices`
  std::vector<Need> needs = {};
  std::vector<Contradiction> contradicts = {};
  std::string_view reason = {};   // why values other than the default, or words that are no choice, are refused or have no effect
  std::string_view refused = {};  // the only value that `reason` is about; empty if `reason` is about all of them
  Effect effect = Effect::Own;
  Kind kind = Kind::Text;
  int64_t least = 0, most = kNoLimit;  // limits of Kind::Integer and Kind::Number
  Call call = Call::None;
  bool is_of_version_1 = false;  // Accelerate has no such key with fsdp_version 2
  bool is_of_deepspeed = false;  // Accelerate has it in the section deepspeed_config; here it has its effect in any training
  bool is_written = false;       // Accelerate writes it into each file
  Section section = Section::Top;
};

std::span<const Key> keys();

/// Whether a value of the key changes something here.
inline bool has_effect(const Key& key) {
  return key.effect == Effect::Own;
}

/// Returns the current name of a key that has an older name; any other name unchanged.
std::string_view todays_name(std::string_view name);
/// Returns null if there is no such key. Also finds a key by an older name.
const Key* find_key(std::string_view name);

/// The name of a section in a file, "fsdp_config", and the prefix of its keys, "fsdp_". Both are empty for the top.
std::string_view section_name(Section section);
std::string_view section_prefix(Section section);
/// All sections but the top.
inline constexpr Section kSections[] = {Section::Fsdp, Section::Tessera, Section::Parallelism, Section::Dynamo};

/// Returns " here (tessera_residence belongs under tessera_config)" for "residence" or "tessera_residence"; empty if no key has the name.
std::string places_of(std::string_view name);
/// Returns " (did you mean fsdp_version?)"; empty if no key has a similar name.
std::string suggestion(std::string_view name);

}  // namespace tessera::config
