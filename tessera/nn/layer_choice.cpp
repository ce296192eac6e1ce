#include "tessera/nn/layer_choice.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <regex>

#include "tessera/base/error.h"

namespace tessera::nn {
namespace {

constexpr std::string_view kOutputLayers[] = {"lm_head", "head"};
const std::vector<std::string> kAllLinear = {"all-linear"};

}  // namespace

bool matches(const std::string& name, const std::string& expression) try {
  static thread_local std::map<std::string, std::regex> known;  // because compiling an expression takes longer than matching
  auto found = known.find(expression);
  if (found == known.end()) found = known.emplace(expression, expression).first;
  return std::regex_match(name, found->second);
} catch (const std::regex_error& error) {
  throw UsageError("'{}' is not a regular expression: {}", expression, error.what());
}

bool is_named(std::string_view name, std::string_view wanted) {
  return name.ends_with(wanted) && (name.size() == wanted.size() || name[name.size() - wanted.size() - 1] == '.');
}

bool is_in(std::string_view name, const std::vector<std::string>& wanted) {
  return std::ranges::any_of(wanted, [&](const auto& each) { return is_named(name, each); });
}

std::string last_parts(const std::vector<std::string>& names) {
  std::vector<std::string> parts;
  for (const auto& name : names) {
    auto last = name.substr(name.rfind('.') + 1);
    if (std::ranges::find(parts, last) == parts.end()) parts.push_back(std::move(last));
  }
  return parts.empty() ? "none" : fmt::format("{}", fmt::join(parts, ", "));
}

bool LayerChoice::contains(const std::string& name, bool is_linear) const {
  if (is_in(name, exclude_modules)) return false;
  if (!target_pattern.empty()) return matches(name, target_pattern);
  if (!target_modules.empty() && target_modules != kAllLinear) return is_in(name, target_modules);
  return is_linear && std::ranges::none_of(kOutputLayers, [&](std::string_view output) { return is_named(name, output); });
}

void expect_choice(const LayerChoice& choice, const std::vector<std::string>& names, size_t chosen, std::string_view what) {
  for (const auto& wanted : choice.target_modules) {
    if (choice.target_modules == kAllLinear) break;
    if (std::ranges::any_of(names, [&](const std::string& name) { return is_named(name, wanted); })) continue;
    throw UsageError("{}: no layer is named '{}'; layers for which it can be are named: {}", what, wanted, last_parts(names));
  }
  if (chosen == 0) throw UsageError("{}: no layer is chosen; layers for which it can be are named: {}", what, last_parts(names));
}

}  // namespace tessera::nn
