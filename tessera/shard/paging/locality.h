// Local values: tensors computed from shards. Finds the parameter from whose shard a local value was computed, and refuses operators that
// would give a wrong result because each rank has only its part of the values.
#pragma once

#include "tessera/shard/dispatch/operators.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/storage/storage_tag.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

/// The parameter from whose shard a local value comes; `tag` is the tensor's storage tag or null. Returns null for other tensors.
SourceParameterPtr source_of(const at::Tensor& tensor, const StorageTag* tag);

/// Marks the results on the stack, from `base` on, as local values. They get the paging key, so that operators on them are checked as well.
void mark_results(const Stack& stack, size_t base, const SourceParameterPtr& source);

/// Throws UsageError if the operator would combine values of different places, or draw random numbers: its result for this rank's values
/// would look like the result for the full parameter.
void expect_no_mixing(const OperatorFacts& op, OperatorKind kind, const SourceParameter& source);
/// Throws UsageError: the operator picks values by position, and positions differ between a shard and the full parameter.
[[noreturn]] void refuse_places(const OperatorFacts& op, const SourceParameter& source);
/// Throws UsageError if a view on the stack, from `base` on, has fewer than `numel` values, the number that the viewed local value has.
void expect_all_values(const OperatorFacts& op, int64_t numel, const Stack& views, size_t base, const SourceParameter& source);
/// Throws UsageError if an elementwise operator, whose arguments begin at `base`, would combine a local value with a tensor of another
/// size, or write it into a view of an ordinary tensor, which can't be marked as a local value.
void expect_same_places(const OperatorFacts& op, const Stack& stack, size_t base, const SourceParameter& source);

/// Makes libtorch refuse to save a tensor that has only this rank's part of the values (torch::save, pickle_save), because nothing in the
/// file would say so. Acts once per process.
void watch_saves();

}  // namespace tessera
