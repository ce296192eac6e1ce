// PyTorch's names for optimizers and their state, for optimizers with the same update rule in Tessera.
#pragma once

#include <map>
#include <nlohmann/json.hpp>
#include <string>

#include "tessera/checkpoint/optimizer_ref.h"

namespace tessera::checkpoint {

/// The name of the class of an optimizer if a checkpoint has its state, but no settings that tell the class.
inline constexpr auto kSomeOptimizer = "an optimizer of PyTorch";

/// The class of torch::optim that has these settings in Python, or kSomeOptimizer.
std::string class_of_settings(const nlohmann::json& settings);
/// All settings of a class in Python, with PyTorch's defaults. An empty object for a class that PyTorch does not have.
nlohmann::json default_settings(const std::string& optimizer);

/// Whether state of one class can be loaded into the other: the classes are the same, or have the same update rule in Tessera and in
/// torch::optim, or one is kSomeOptimizer, so that only the keys of the state can show whether it fits.
bool is_same_rule(const std::string& one, const std::string& other);

/// PyTorch's name for `key` in the state of this class; empty if PyTorch does not keep it.
std::string torch_key(const std::string& optimizer, const std::string& key);
/// The name in the class `to` for state that was saved as `key` of the class `from`; empty if `to` does not keep it.
std::string renamed_key(const std::string& key, const std::string& from, const std::string& to);
/// State of the class `from` as the class `to` names it.
std::map<std::string, optim::ParameterState> renamed(std::map<std::string, optim::ParameterState> state, const std::string& from,
                                                     const std::string& to);

}  // namespace tessera::checkpoint
