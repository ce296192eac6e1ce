// Options of checkpoint::load: how a checkpoint may differ from the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/notes.h"

namespace tessera::checkpoint {

/// Names are regular expressions (ECMAScript) that match the whole name of a parameter or buffer: "head\\..*".
struct LoadOptions {
  std::vector<std::string> may_be_missing = {};  // in the checkpoint: these keep their values
  std::vector<std::string> may_be_unknown = {};  // in the model: these are left out, with their optimizer state
  /// Takes the first value of a tied parameter whose names have different values in the checkpoint. Otherwise they are an error.
  bool first_of_tied = false;
  /// Assigns state that identifies parameters by number, as Python's optimizer.state_dict() does, to the parameters of the optimizer here,
  /// group by group and in the order of the model. Otherwise such state is an error. Shapes are compared, but parameters of the same
  /// shape can't be told apart.
  bool optimizer_by_numbers = false;
  /// If the number of ranks is not that of the save and notes differ by rank, all ranks take those of rank 0. Otherwise that is an error.
  bool notes_of_first_rank = false;
  /// Called with the notes before anything changes. An exception on one rank is thrown on all, and nothing is loaded.
  std::function<void(const Notes& notes)> expect = {};
};

}  // namespace tessera::checkpoint
