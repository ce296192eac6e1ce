// How a rank says what it is about to do: the one way to an Envelope.
#pragma once

#include <c10/util/FunctionRef.h>

#include <span>

#include "tessera/comm/host/envelope.h"
#include "tessera/comm/transport.h"

namespace tessera {

/// `fill` adds what the operation works on. An exception in it becomes this rank's refusal, so that the others get an error at once
/// instead of waiting for it.
Envelope envelope_for(Operation operation, const Call& call, c10::function_ref<void(Envelope&)> fill = {});

/// Throws UsageError where the memory can't take part.
void describe(Envelope& envelope, const at::Tensor& tensor, const Transport::Traits& group);
void describe(Envelope& envelope, std::span<const Piece> pieces, const Transport::Traits& group);

/// Makes envelopes differ where this number does.
void mix_into_layout(Envelope& envelope, int64_t number);

/// The memory of a tensor.
std::span<std::byte> bytes_of(const at::Tensor& tensor);
/// Part `index` of `parts` equal ones.
std::span<std::byte> part_of(std::span<std::byte> all, size_t index, size_t parts);

}  // namespace tessera
