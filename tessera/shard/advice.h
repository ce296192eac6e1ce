// Advice on how a model is divided into units: rules over plain numbers, of a live model (describe) or of a recorded run (tessera report).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

/// A module inside of a unit that could be a unit of its own.
struct PartFacts {
  std::string class_name;
  uint64_t bytes = 0;  // of its parameters in this unit
  size_t depth = 1;    // below the unit's module; containers such as ModuleList do not count
};

/// A unit on one rank. Facts that are not known keep their defaults.
struct UnitFacts {
  std::string name;
  std::string class_name = {};  // of its module; given if its parts are
  uint64_t bytes = 0;           // that unsharding it takes; 0 for units that are node-shared or whole on every rank
  size_t depth = 0;             // the number of units around it
  bool keeps = false;           // reshard_after_forward is false
  double waits = 0;             // in a measured run: the part of its time in which ranks wait for the bytes of this unit
  std::vector<PartFacts> parts = {};
};

struct Advice {
  std::string name;         // of the cause
  std::string title;        // a sentence
  std::string evidence;     // sentences with numbers
  std::string change = {};  // lines of C++ or sentences; empty if they depend on more than is known
  std::vector<std::string> units = {};
  std::vector<int> ranks = {};
};

/// Finds units that are too large ("one-unit", "unit-too-large") or too small ("units-too-small"). They are in the order of the model,
/// outer units before inner ones. `process` is the memory of the largest process of a measured run, 0 if nothing was measured.
std::vector<Advice> advice_on_units(const std::vector<UnitFacts>& units, double process = 0);

}  // namespace tessera
