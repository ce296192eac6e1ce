// Advice on how a model is divided into units: rules over plain numbers, from a live model (describe) or from the files of a run.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

/// A module inside of a unit that could be a unit of its own.
struct PartFacts {
  std::string path, class_name;
  uint64_t bytes = 0;         // of its parameters in this unit
  size_t depth = 1;           // below the unit's module; containers such as ModuleList do not count
  bool is_elsewhere = false;  // another unit has modules of this class, too
};

/// A unit on one rank. Numbers a step are means. Facts that are not known keep their defaults.
struct UnitFacts {
  std::string name;
  std::string class_name = {};       // of its module; given if its parts are
  uint64_t bytes = 0;                // of its whole parameters, in the dtype in which operators use them
  bool is_node_shared = false;       // unsharding takes no memory
  bool keeps = false;                // reshard_after_forward is false
  bool is_frozen = false;            // all of its parameters are
  bool is_tied = false;              // one of its parameters has several names
  size_t depth = 0;                  // the number of units around it
  double gathers = 0, received = 0;  // all-gathers a step, and bytes that they bring from other ranks
  std::vector<PartFacts> parts = {};
};

/// The units in the order of the model, outer units before inner ones.
struct ModelFacts {
  std::vector<UnitFacts> units;
  int ranks = 1;
  double steps = 0;                    // over which the next numbers were counted
  uint64_t misses = 0, cancelled = 0;  // of all units
};

struct Advice {
  /// "one unit", "large unit", "small units", "frozen units", "unit used often", "order changes" or "prefetches lost"
  std::string kind = {};
  std::string unit = {};    // empty if the advice is about several units
  std::string text = {};    // sentences with numbers
  std::string change = {};  // lines of C++; empty if they depend on more than these facts
};

/// The most bytes of unsharded units in a step: of a unit, of the next one, and of the root, which stays unsharded.
uint64_t expected_peak(const std::vector<UnitFacts>& units);

/// Returns nothing for a single rank, and for a model that is divided well.
std::vector<Advice> advice_for(const ModelFacts& model);

/// "512 B", "1.5 kB", "21.3 MB"; "-" for nothing.
std::string size_text(uint64_t bytes);

}  // namespace tessera
