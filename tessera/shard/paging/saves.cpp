#include "tessera/shard/paging/saves.h"

#include <fmt/format.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include "tessera/base/error.h"
#include "tessera/shard/paging/locality.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {
namespace {

/// Libtorch asks here of each tensor what else is to be written of it.
void expect_whole(const at::Tensor& tensor, std::unordered_map<std::string, bool>& /*more*/) {
  if (!is_paged(tensor)) return;
  const auto* const tag = tag_of(tensor);
  if (tag != nullptr && tag->role == Role::Unsharded) return;
  const auto origin = origin_of(tensor, tag);
  const auto unit = origin ? origin->unit.lock() : nullptr;
  if (!unit) return;
  const auto& parameter = parameter_of(*unit, *origin);
  const bool is_whole = unit->mesh().shard().size() == 1 && tensor.sizes() == at::IntArrayRef(parameter.sizes);
  if (is_whole) return;  // of one rank, but shards may be flat there, too
  throw UsageError(
      fmt::format("torch::save would write this rank's part of {} alone, and whoever reads the file would take it for all of it; write "
                  "instead, on every rank, tessera::checkpoint::save(folder, {{.model = model.get(), .optimizer = &optimizer}}, world), "
                  "which load() and load_weights() read, or save tessera::full_state(*model). tessera::to_local(tensor) gives this "
                  "rank's values, for programs that mean these",
                  name_of(parameter, *unit)));
}

}  // namespace

void watch_saves() {
  [[maybe_unused]] static const bool once = [] {
    for (auto& asked : torch::jit::GetBackendMetaSerialization()) {
      if (!asked) asked.emplace(&expect_whole, [](const at::Tensor&, std::unordered_map<std::string, bool>&) {});
    }
    return true;
  }();
}

}  // namespace tessera
