// What all ranks have in common, in messages of constant size: the least and the most of two numbers.
#pragma once

#include "tessera/comm/operation.h"

namespace tessera {

/// Plain bytes, which links send. To add a digest twice changes nothing.
struct Digest {
  Extremes what;   // of a hash over what each rank is about to do
  Extremes known;  // of a number that only some of them may have

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
