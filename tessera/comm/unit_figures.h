// UnitFigures: facts about a unit of a model, which records, dry runs, reports and advice share.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tessera {

/// A module inside of a unit that could be a unit of its own.
struct UnitPart {
  std::string class_name;
  uint64_t bytes = 0;  // of its parameters in this unit
  int64_t depth = 1;   // below the unit's module; containers such as ModuleList do not count
};

/// Facts that are not known keep their defaults.
struct UnitFigures {
  std::string name;
  std::string class_name = {};  // of its module; given if its parts are
  int64_t parameters = 0;
  uint64_t unsharded = 0, shard = 0;  // bytes
  std::string dtype = {}, residence = {};
  int64_t depth = 0;   // the number of units around it
  bool keeps = false;  // reshard_after_forward is false
  double waits = 0;    // in a measured run: the part of its time in which ranks wait for the bytes of this unit
  std::vector<UnitPart> parts = {};
};
NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE_WITH_DEFAULT(UnitFigures, name, parameters, unsharded, shard, dtype, residence, depth)

}  // namespace tessera
