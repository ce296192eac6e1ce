// Mixes the samples of training batches in a Loader's workers.
#pragma once

#include <cstdint>

#include "tessera/data/loader.h"

namespace tessera::vision {

/// With both, each batch is mixed in one of the two ways, as often as in the other.
struct Mixing {
  double mixup = 0;   // the alpha of mixup's Beta(alpha, alpha), such as 0.2; 0 for none
  double cutmix = 0;  // that of cutmix, such as 1; 0 for none
  int64_t classes = 0;
};

/// Mixes the samples of what each call of `fetch` returns, so targets become floats {n, classes}. Draws come from the seed of the first
/// sample. A sample is mixed with one of its own rank, so other numbers of ranks mix other pairs. Without mixup and cutmix it returns
/// `fetch`.
data::SeededFetch mix(data::SeededFetch fetch, const Mixing& options);

}  // namespace tessera::vision
