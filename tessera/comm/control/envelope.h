// A fixed-size description of what a rank is about to do. Ranks exchange and compare envelopes before any data moves.
#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "tessera/comm/host/caller_threads.h"
#include "tessera/comm/host/fixed_text.h"
#include "tessera/comm/host/link.h"
#include "tessera/comm/operation.h"

namespace tessera {

/// Has no padding, so equal operations have equal bytes.
struct Envelope {
  uint64_t sequence = 0;  // number of operations that the group ran before
  uint64_t number = 0;
  uint64_t version = 0;
  uint64_t members = 0;
  uint64_t layout = 0;  // hash over the sizes of all pieces, or over the colors of a split
  int64_t numel = 0;    // the sum over all pieces
  int32_t pieces = 0;
  int32_t root = 0;
  Operation operation = Operation::Barrier;
  uint8_t reduce = 0;
  int8_t dtype = 0;
  int8_t wire_dtype = 0;
  int8_t sum_dtype = 0;
  bool refused = false;  // this rank can't take part, for the reason in `words`
  std::array<char, 2> unused = {};
  FixedText<80> unit = {};  // only the end of a longer name
  /// If `refused`, the reason; otherwise the subject's `writer`.
  FixedText<192> words = {};
  /// The function of the library that the program is in, see Calling. It is not compared.
  FixedText<64> call = {};

  void refuse(std::string_view why);
  /// Mixes a number into the layout hash, so that envelopes differ if the numbers do.
  void mix_into_layout(int64_t number) { layout = (layout ^ static_cast<uint64_t>(number)) * 0x100000001b3ULL + 0x9e3779b97f4a7c15ULL; }
  /// Whether the envelope's rank waits in tessera::recover for the other ranks.
  bool recovers() const { return unit.view() == kRecovery; }

  /// A digest of all fields that ranks must have in common. The writer is in `known`, because a rank may not know it. The digest of a
  /// refusal agrees with no other digest.
  Digest digest() const;

  /// "all_gather of 'layers.3' version 7: 2 pieces, 4096 x BFloat16"; "barrier, in checkpoint::save"
  std::string describe() const;
  /// Advice for the error of a rank that waits in this operation for a rank that never comes. Empty if there is none.
  std::string advice_if_alone() const;
  /// Whether the operation most likely belongs to a forward or backward pass.
  bool is_of_pass() const;
};
static_assert(std::has_unique_object_representations_v<Envelope>);

/// Throws UsageError if a rank refuses, with the reasons of all ranks that do. Throws DisagreementError if the envelopes differ otherwise,
/// with what each rank is about to do. Every rank passes the same envelopes and so throws the same error, except for a hint on a rank where
/// several threads call the group. Ranks are named by their `world_ranks`.
void expect_agreement(std::span<const Envelope> envelopes, std::span<const int> world_ranks, Callers callers = Callers::OneThread);

}  // namespace tessera
