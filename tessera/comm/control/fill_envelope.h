// Makes envelopes. No other code fills their fields from tensors.
#pragma once

#include <c10/util/FunctionRef.h>

#include <span>

#include "tessera/comm/control/envelope.h"
#include "tessera/comm/host/bytes.h"
#include "tessera/comm/traits.h"

namespace tessera {

/// `fill` describes the operands. If it throws, this rank refuses, so that all ranks get an error at once instead of waiting for this one.
Envelope envelope_for(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill = {});

/// Throws UsageError if the tensors can't be sent, or if an `own` does not fit its `whole`.
void describe(Envelope& envelope, const at::Tensor& tensor, const GroupTraits& group);
void describe(Envelope& envelope, std::span<const Piece> pieces, const GroupTraits& group);
/// The reduction must be resolved.
void describe(Envelope& envelope, const Reduction& reduction);

/// Mixes a number into the layout hash, so that envelopes differ if the numbers do.
void mix_into_layout(Envelope& envelope, int64_t number);

}  // namespace tessera
