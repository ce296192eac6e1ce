// The kinds of write to shards.
#pragma once

namespace tessera {

enum class WriteKind {
  Operators,         // operators of the user write the shards; more may follow, so the new version is published at this rank's next read
  Update,            // one of our optimizers writes the shards, and calls publish() at its end
  UpdateWithCopies,  // the same, and it also writes the cast copies
  Skip,              // this rank leaves its shards unchanged while other ranks take a step
  Load,              // all ranks load the same checkpoint
  Unsharded,         // the shards take over the values that were written to the unsharded parameters; the caller has pinned the units
};
constexpr bool is_update(WriteKind how) {
  return how == WriteKind::Update || how == WriteKind::UpdateWithCopies;
}

}  // namespace tessera
