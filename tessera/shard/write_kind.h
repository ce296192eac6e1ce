// The kinds of write to shards.
#pragma once

namespace tessera {

enum class WriteKind {
  Operators,  // operators of the program write the shards; more writes may follow, so the new version is published at this rank's next read
  Update,     // one of Tessera's optimizers writes the shards, and calls WriteGuard::commit() when it has finished
  UpdateWithCopies,  // the same, and the optimizer also writes the cast copies
  Skip,              // this rank leaves its shards unchanged while other ranks take a step
  Load,              // all ranks load the same checkpoint
  Unsharded,         // the shards get the values that the program wrote to the unsharded parameters; the caller has pinned the units
};
constexpr bool is_update(WriteKind how) {
  return how == WriteKind::Update || how == WriteKind::UpdateWithCopies;
}

}  // namespace tessera
