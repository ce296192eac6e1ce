// Makes envelopes. No other code fills their fields from tensors.
#pragma once

#include <c10/util/FunctionRef.h>

#include <span>

#include "tessera/comm/control/envelope.h"
#include "tessera/comm/traits.h"

namespace tessera {

/// Makes an envelope, in which `fill` describes the operands. If `fill` throws, the envelope says that this rank refuses, so that all ranks
/// get an error at once instead of waiting for this one; if the rank `is_alone`, throws UsageError instead.
Envelope envelope_for(Operation operation, const Subject& subject, c10::function_ref<void(Envelope&)> fill = {}, bool is_alone = false);

/// Describes the tensors. Throws UsageError if they can't be sent. If they `have_parts`, each `own` must fit its `whole`, which has one
/// part for each rank.
void describe(Envelope& envelope, std::span<const Piece> pieces, const GroupTraits& group, bool have_parts = true);
/// Describes a reduction, which must be resolved.
void describe(Envelope& envelope, const Reduction& reduction);
/// Describes a request, and resolves its reduction.
void describe(Envelope& envelope, Request& request, const GroupTraits& group);

}  // namespace tessera
