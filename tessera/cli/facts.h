// Facts about machine and build that `tessera env` prints, as text for people and as JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace tessera::cli {

struct Fact {
  std::string name;
  nlohmann::ordered_json value;  // null if it is unknown
  std::string text;              // for people
};

struct Chapter {
  std::string name;
  std::vector<Fact> facts;
};

/// Makes a fact whose text is its value, or `otherwise` if the value is not known.
Fact fact(std::string name, const std::optional<std::string>& value, const std::string& otherwise = "unknown");
Fact bytes_fact(std::string name, std::optional<uint64_t> bytes, const std::string& otherwise = "unknown");

/// Registers the function that lists the installed plugins of XLA devices, while the module of the package xla is loaded.
struct AddedXlaFacts {
  explicit AddedXlaFacts(Chapter (*facts)());
};

/// Returns the memory of this host, or the limit of this process's control groups if that is less.
std::optional<uint64_t> usable_memory();

/// Returns the facts of the system, the processors, the memory, and the limits of both.
std::vector<Chapter> facts_of_machine();

}  // namespace tessera::cli
