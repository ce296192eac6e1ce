// Makes envelopes. No other code fills their fields from tensors.
#pragma once

#include <c10/util/FunctionRef.h>

#include <span>

#include "tessera/comm/control/envelope.h"
#include "tessera/comm/traits.h"

namespace tessera {

/// `fill` describes the operands. If it throws, this rank refuses, so that all ranks get an error at once instead of waiting for this one;
/// a rank that `is_alone` throws.
Envelope envelope_for(Operation operation, const Subject& subject, c10::function_ref<void(Envelope&)> fill = {}, bool is_alone = false);

/// Throws UsageError if the tensors can't be sent, or if an `own` does not fit its `whole`, of which it is one part for each rank if they
/// `have_parts`.
void describe(Envelope& envelope, std::span<const Piece> pieces, const GroupTraits& group, bool have_parts = true);
/// The reduction must be resolved.
void describe(Envelope& envelope, const Reduction& reduction);
/// Resolves the reduction of the request.
void describe(Envelope& envelope, Request& request, const GroupTraits& group);

}  // namespace tessera
