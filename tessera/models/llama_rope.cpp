#include "tessera/models/llama_rope.h"

#include <cmath>
#include <utility>

namespace tessera::models {
namespace {

/// Calls visit(key, member) for the members of a scaling.
void each_of_scaling(auto& scaling, const auto& visit) {
  visit("factor", scaling.factor);
  visit("low_freq_factor", scaling.low_freq_factor);
  visit("high_freq_factor", scaling.high_freq_factor);
  visit("original_max_position_embeddings", scaling.original_max_position_embeddings);
}

/// Calls visit(key, member) for the members of a scaling that files may lack.
void each_of_yarn(auto& scaling, const auto& visit) {
  visit("original_max_position_embeddings", scaling.original_max_position_embeddings);
  visit("beta_fast", scaling.beta_fast);
  visit("beta_slow", scaling.beta_slow);
  visit("truncate", scaling.truncate);
}

void read_yarn(const ConfigFile& inner, int64_t longest, nn::RotaryOptions& rope) {
  auto& yarn = rope.yarn.emplace();
  yarn.original_max_position_embeddings = longest;
  if (inner.find("factor") == nullptr) inner.refuse("factor", "yarn needs it");
  inner.read("factor", yarn.factor);
  each_of_yarn(yarn, [&](const char* key, auto& member) {
    if (inner.find(key) != nullptr) inner.read(key, member);
  });
  std::optional<double> given, scale, of_all;
  inner.read("attention_factor", given);
  inner.read("mscale", scale);
  inner.read("mscale_all_dim", of_all);
  const auto grown = [&](double by) { return yarn.factor <= 1 ? 1 : 0.1 * by * std::log(yarn.factor) + 1; };
  const bool has_scales = scale.value_or(0) != 0 && of_all.value_or(0) != 0;
  rope.attention_factor = given.value_or(has_scales ? grown(*scale) / grown(*of_all) : grown(1));
}

void read_longrope(const ConfigFile& file, const ConfigFile& inner, int64_t longest, nn::RotaryOptions& rope) {
  auto& longrope = rope.longrope.emplace();
  for (const auto& [key, member] : {std::pair{"short_factor", &longrope.short_factor}, {"long_factor", &longrope.long_factor}}) {
    inner.read(key, *member);
    if (member->empty()) inner.refuse(key, "longrope needs a list of numbers");
  }
  for (const auto* each : {&inner, &file}) each->read("original_max_position_embeddings", longrope.original_max_position_embeddings);
  rope.attention_factor = nn::usual_attention_factor(rope, longest);
}

}  // namespace

void read_rope(const ConfigFile& file, const std::string& key, LlamaConfig& config) {
  auto& rope = config.rope;
  const auto* found = file.find(key);
  if (found == nullptr) return;
  if (!found->is_object()) file.refuse(key, "this must be an object with rope_type");
  ConfigFile inner{.path = file.path, .json = *found, .prefix = file.prefix + key + ": "};
  if (found->contains(kFull)) {  // of each kind of layers
    LlamaConfig local;
    read_rope(inner, std::string(kSliding), local);
    if (local.rope != nn::RotaryOptions{.theta = local.rope.theta}) inner.refuse(std::string(kSliding), "only rope_theta is read here");
    config.rope_local_base_freq = local.rope.theta;
    return read_rope(inner, std::string(kFull), config);
  }
  std::string type = "default";
  inner.read("type", type);
  inner.read("rope_type", type);
  inner.read("rope_theta", rope.theta);
  inner.read("partial_rotary_factor", rope.partial_rotary_factor);
  const bool is_phi = config.model_type == "phi3";
  if (is_phi && (type == "su" || type == "yarn")) type = "longrope";  // its names in the first files of Phi 3
  if (type == "linear") {
    inner.read("factor", rope.factor);
  } else if (type == "llama3") {
    each_of_scaling(rope.llama3.emplace(), [&](const char* key, auto& member) {
      if (inner.find(key) == nullptr) inner.refuse(key, "llama3 needs it");
      inner.read(key, member);
    });
  } else if (type == "yarn") {
    read_yarn(inner, config.max_position_embeddings, rope);
  } else if (type == "longrope" && is_phi) {
    read_longrope(file, inner, config.max_position_embeddings, rope);
  } else if (type != "default") {
    inner.refuse(inner.json.contains("rope_type") ? "rope_type" : "type", "choose default, linear, llama3 or yarn; phi3 also has longrope");
  }
}

void write_rope(const nn::RotaryOptions& rope, Json& json) {
  json["rope_scaling"] = nullptr;
  if (rope.llama3) {
    json["rope_scaling"] = {{"rope_type", "llama3"}};
    each_of_scaling(*rope.llama3, [&](const char* key, auto member) { json["rope_scaling"][key] = member; });
  } else if (rope.yarn) {
    json["rope_scaling"] = {{"rope_type", "yarn"}, {"factor", rope.yarn->factor}, {"attention_factor", rope.attention_factor}};
    each_of_yarn(*rope.yarn, [&](const char* key, auto member) { json["rope_scaling"][key] = member; });
  } else if (rope.longrope) {  // transformers 4 wants these three keys alone
    json["rope_scaling"] = {
        {"type", "longrope"}, {"short_factor", rope.longrope->short_factor}, {"long_factor", rope.longrope->long_factor}};
    json["original_max_position_embeddings"] = rope.longrope->original_max_position_embeddings;
  } else if (rope.factor != 1) {
    json["rope_scaling"] = {{"rope_type", "linear"}, {"factor", rope.factor}};
  }
}

}  // namespace tessera::models
