// What a model and the checkpoint that is loaded into it need not have in common.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/notes.h"

namespace tessera::checkpoint {

/// Names are those of parameters and buffers, whole, as regular expressions (ECMAScript): "head\\..*".
struct LoadOptions {
  std::vector<std::string> may_be_missing = {};  // in the checkpoint: these keep their values
  std::vector<std::string> may_be_unknown = {};  // in the model: these are left out, with their optimizer state
  /// Of a tied parameter whose names have different values in the checkpoint, the first is taken. Otherwise that is an error.
  bool first_of_tied = false;
  /// State that knows parameters by numbers, as optimizer.state_dict() of Python, is that of the parameters of the optimizer here, group by
  /// group and in the order of the model. Otherwise such state is an error. Shapes are compared, but parameters of one shape look the same.
  bool optimizer_by_numbers = false;
  /// On another number of ranks than saved, notes that differ by rank are an error, or all ranks take those of rank 0.
  bool notes_of_first_rank = false;
  /// Called with the notes before anything changes. What it throws on one rank is thrown on all, and nothing is loaded.
  std::function<void(const Notes& notes)> expect = {};
};

}  // namespace tessera::checkpoint
