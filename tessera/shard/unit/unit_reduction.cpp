// How the gradients of a unit become their mean over all ranks.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

#include "tessera/shard/paging/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

const GradientMemory& Unit::gradient_memory(Group& group) {
  auto& memory = group.gradient;
  // That of the gradient before, if nobody has it any more: fresh pages cost more than the sum.
  if (memory && memory.storage.use_count() == 1) return memory;
  const auto bytes = static_cast<size_t>(group.chunk) * c10::elementSize(group.dtype);
  const auto number = static_cast<size_t>(&group - groups_.data());
  memory.storage = tagged_storage(Role::Gradient, shared_from_this(), number, bytes, group.own.device());
  auto& storage = *memory.storage.unsafeGetStorageImpl();
  fill(storage);
  explain(storage,
          fmt::format("the gradients of unit '{}' are on their way to the sum over all ranks; operators wait for that by themselves, "
                      "raw pointers can be had when backward() has returned",
                      name_));
  memory.values = memory_view(storage, group.dtype);
  return memory;
}

void Unit::start_reduction(std::span<Group* const> groups, std::span<const at::Tensor> wholes, std::string_view name, uint64_t members) {
  c10::SmallVector<Piece, 2> pieces;
  c10::SmallVector<GradientMemory, 2> reduced;
  for (size_t i = 0; i < groups.size(); i++) {
    auto& memory = groups[i]->gradient;
    if (wants_squares_ && !memory.squares) memory.squares = std::make_shared<double>();
    if (memory.squares) *memory.squares = std::numeric_limits<double>::quiet_NaN();
    pieces.push_back({.whole = wholes[i], .own = memory.values, .squares = memory.squares});
    reduced.push_back(memory);
  }
  reducing_ = memory_->reduce(pieces, {.unit = name, .number = number_, .version = version_, .members = members});
  reduced_ = std::move(reduced);
  for (const auto& memory : reduced_) close(*memory.storage.unsafeGetStorageImpl());
  reduces_ = true;
  counters_.reductions++;
}

void Unit::finish_reduction() {
  if (!reduces_) return;
  const auto works = std::exchange(reducing_, {});
  const auto reduced = std::exchange(reduced_, {});
  const auto& replicas = options_.mesh.replicate();
  try {
    for (const auto& work : works) work.wait();
    for (const auto& memory : reduced) {
      if (replicas.size() > 1) replicas.all_reduce(memory.values, {.op = Reduce::Mean}, {.unit = name_, .number = number_}).wait();
    }
  } catch (...) {
    // The gradients have been handed on already: nobody shall take what is there for one.
    for (const auto& memory : reduced) {
      memory.values.fill_(std::numeric_limits<double>::quiet_NaN());
      open(*memory.storage.unsafeGetStorageImpl());
    }
    reduces_ = false;
    throw;
  }
  for (const auto& memory : reduced) {
    auto& storage = *memory.storage.unsafeGetStorageImpl();
    open(storage);
    if (replicas.size() == 1 && memory.squares && !std::isnan(*memory.squares)) remember_squares(storage, *memory.squares);
  }
  reduces_ = false;  // only now: other threads ask without the lock
}

void Unit::abandon_reduction() {
  reducing_.clear();
  for (const auto& memory : std::exchange(reduced_, {})) open(*memory.storage.unsafeGetStorageImpl());
  reduces_ = false;
}

}  // namespace tessera
