// The contents of a save: the values that the ranks of this process have, and the records that describe them.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "tessera/checkpoint/notes.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/comm/communicator.h"

namespace tessera {
struct LocalValues;
}

namespace tessera::checkpoint {

struct Contents;

struct RankContents {
  RankRecord record;
  std::vector<std::pair<std::string, at::Tensor>> tensors = {};
};

/// The entries of the rank's tensors in its file.
std::vector<SafetensorsEntry> entries_of(const RankContents& rank);

/// Returns the contents of every rank that this process represents. The tensors are the model's and the optimizer's own, not copies. Throws
/// UsageError for contents that can't be saved. `save` is RankRecord::save.
std::vector<RankContents> contents_of_ranks(uint64_t save, const Contents& contents, const Communicator& world);

/// Warns once, on rank 0, of each parameter that looks tied in the program but is saved on its own: its member was set to a tensor of the
/// same shape, while the name still refers to the tensor that was registered first.
void warn_of_lost_ties(const LocalValues& model, const Communicator& world);

/// Throws UsageError for notes that JSON can't hold: bytes that are not UTF-8.
void expect_text(const Notes& notes);

}  // namespace tessera::checkpoint
