// Options of checkpoint::load: how a checkpoint may differ from the model.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "tessera/checkpoint/notes.h"

namespace tessera::checkpoint {

/// Names are regular expressions (ECMAScript) that match the whole name of a parameter or buffer: "head\\..*".
struct LoadOptions {
  std::vector<std::string> may_be_missing = {};  // names that the checkpoint may lack: their values stay
  std::vector<std::string> may_be_unknown = {};  // names that the model may lack: they are not loaded, nor is their optimizer state
  /// If the names of a tied parameter have different values in the checkpoint: true takes the value of the first name, false makes load()
  /// throw.
  bool first_of_tied = false;
  /// Assigns state that identifies parameters by number, as Python's optimizer.state_dict() does, to the parameters of contents.optimizer,
  /// group by group and in the order of the model. If false, load() throws for such state. Shapes are compared, but parameters of the same
  /// shape can't be told apart.
  bool optimizer_by_numbers = false;
  /// If the save had another number of ranks and notes that differ by rank: true gives all ranks the notes of rank 0, false makes load()
  /// throw.
  bool notes_of_first_rank = false;
  /// Called with the notes before anything changes. An exception on one rank is thrown on all ranks, and nothing is loaded.
  std::function<void(const Notes& notes)> expect = {};
};

}  // namespace tessera::checkpoint
