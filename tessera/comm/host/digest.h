// Compares ranks by messages of constant size: the least and the most of two numbers.
#pragma once

#include <limits>

#include "tessera/comm/operation.h"

namespace tessera {

/// Plain bytes, which links send. Adding a digest twice changes nothing.
struct Digest {
  Extremes what;   // of a hash over what each rank is about to do
  Extremes known;  // of a number that only some ranks may have

  /// A digest that agrees with no other: if one rank has it, all ranks see that they do not agree.
  static Digest unfit() { return {.what = {.least = 0, .most = std::numeric_limits<uint64_t>::max()}, .known = {}}; }

  void add(const Digest& other) {
    what.add(other.what);
    known.add(other.known);
  }
  bool agrees() const { return what.are_one() && known.are_one(); }
};

/// Adds the digests of all ranks to that of `rank`, in ceil(log2(size)) turns. In each, `exchange(digest, to, from)` sends the digest to
/// one rank and returns that of another.
template <class Exchange>
void disseminate(Digest& digest, int rank, int size, const Exchange& exchange) {
  for (int distance = 1; distance < size; distance *= 2) {
    digest.add(exchange(digest, (rank + distance) % size, (rank + size - distance) % size));
  }
}

}  // namespace tessera
