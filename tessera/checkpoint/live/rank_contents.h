// What a save writes: the values that the ranks of this process have, and the records that describe them.
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

/// Its tensors as the file of the rank has them.
std::vector<SafetensorsEntry> entries_of(const RankContents& rank);

/// The contents for every rank that this process represents. Tensors are those of the model and the optimizer themselves, not copies.
/// Throws UsageError for what can't be saved. `save` is RankRecord::save.
std::vector<RankContents> contents_of_ranks(uint64_t save, const Contents& contents, const Communicator& world);

/// Warns once, on rank 0, of each parameter that looks tied in the program and is not in the files: its member was set to a tensor of the
/// same shape, so that the name still stands for the values that it had first.
void warn_of_lost_ties(const LocalValues& model, const Communicator& world);

/// Throws UsageError for what JSON can't hold: bytes that are no UTF-8.
void expect_text(const Notes& notes);

}  // namespace tessera::checkpoint
