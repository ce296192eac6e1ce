// How optimizers and their state are called in PyTorch, where we have the same rule.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/checkpoint/optimizer_ref.h"

namespace tessera::checkpoint {

/// The class of an optimizer of which only its state and its settings are known.
inline constexpr auto kSomeOptimizer = "an optimizer of PyTorch";

/// The class of torch::optim that has these settings in Python, or kSomeOptimizer.
std::string class_of_settings(const nlohmann::json& settings);
/// The settings of a class in Python, all of them, with PyTorch's defaults. An empty object for a class that PyTorch has not.
nlohmann::json default_settings(const std::string& optimizer);

/// Whether state of the one class can go on in the other: they are the same, or the same rule of Tessera and of torch::optim, or one is
/// kSomeOptimizer: the class must be inferred from the keys.
bool is_same_rule(const std::string& one, const std::string& other);

/// What PyTorch calls `key` of this class, which has PyTorch's names; empty for what PyTorch does not keep.
std::string torch_key(const std::string& optimizer, const std::string& key);
/// The name in the class `to` for what was saved as `key` of the class `from`; empty for what it does not keep.
std::string renamed_key(const std::string& key, const std::string& from, const std::string& to);
/// State of the class `from` as the class `to` names it.
std::map<std::string, optim::ParameterState> renamed(std::map<std::string, optim::ParameterState> state, const std::string& from,
                                                     const std::string& to);

}  // namespace tessera::checkpoint
