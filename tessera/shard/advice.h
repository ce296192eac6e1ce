// Advice on how a model is divided into units: rules over plain numbers, of a live model (describe) or of a recorded run (tessera report).
#pragma once

#include <string>
#include <vector>

#include "tessera/comm/unit_figures.h"

namespace tessera {

struct Advice {
  std::string name;         // of the cause
  std::string title;        // a sentence
  std::string evidence;     // sentences with numbers
  std::string change = {};  // lines of C++ or sentences; empty if they depend on more than is known
  std::vector<std::string> units = {};
  std::vector<int> ranks = {};
};

/// Finds units that are too large ("one-unit", "unit-too-large") or too small ("units-too-small"). They are in the order of the model,
/// outer units before inner ones. `unsharded` is 0 for units that are node-shared or whole on every rank. `process` is the memory of the largest
/// process of a measured run, 0 if nothing was measured.
std::vector<Advice> advice_on_units(const std::vector<UnitFigures>& units, double process = 0);

}  // namespace tessera
