// The cases of cases.json: what tests/parity/fsdp2.py trains with PyTorch's FSDP2, and train.cpp with Tessera and replicated.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tessera/shard/options.h"

namespace tessera::parity {

struct Case {
  std::string section, name, model;
  int ranks = 0;
  MeshShape mesh;
  std::vector<std::vector<std::string>> units;  // without the last one, which is the rest of the model
  nlohmann::json settings;                      // all of what the file says

  bool has(const std::string& key) const { return settings.contains(key); }
  template <class T>
  T get(const std::string& key, T otherwise) const {
    return settings.value(key, otherwise);
  }
  std::vector<std::string> names(const std::string& key) const { return get(key, std::vector<std::string>{}); }
  std::optional<at::ScalarType> dtype(const std::string& key) const;
  friend std::ostream& operator<<(std::ostream& out, const Case& self) { return out << self.name; }
};

const std::vector<Case>& cases();

}  // namespace tessera::parity
