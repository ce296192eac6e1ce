// LayerChoice: selects layers of a model by their names.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::nn {

struct LayerChoice {
  /// Whole names, or their last parts, such as "q_proj". Empty, or "all-linear": all linear layers but the output layer.
  std::vector<std::string> target_modules = {};
  std::string target_pattern = {};  // in place of target_modules: a regular expression that matches whole names
  std::vector<std::string> exclude_modules = {};

  bool contains(const std::string& name, bool is_linear) const;
};

/// Whether the expression matches the whole name. Throws UsageError for an invalid expression.
bool matches(const std::string& name, const std::string& expression);
/// Whether `wanted` is the whole name, or its end after a dot.
bool is_named(std::string_view name, std::string_view wanted);
bool is_in(std::string_view name, const std::vector<std::string>& wanted);
/// The last parts of names, each once: "q_proj, v_proj".
std::string last_parts(const std::vector<std::string>& names);
/// Throws UsageError, which lists the last parts of `names`, unless each of target_modules fits one of `names`, and `chosen` is above 0.
void expect_choice(const LayerChoice& choice, const std::vector<std::string>& names, size_t chosen, std::string_view what);

}  // namespace tessera::nn
