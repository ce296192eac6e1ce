#include "tessera/vision/mixing.h"

#include <utility>

#include "tessera/base/error.h"
#include "tessera/vision/transforms.h"

namespace tessera::vision {

data::SeededFetch mix(data::SeededFetch fetch, const Mixing& options) {
  if (options.mixup < 0 || options.cutmix < 0) {
    throw UsageError("mixing with alphas of {} and {}: give numbers above 0, such as 0.2 for mixup and 1 for cutmix, or 0 for none",
                     options.mixup, options.cutmix);
  }
  if (options.mixup == 0 && options.cutmix == 0) return fetch;
  if (options.classes < 1) throw UsageError("mixing makes a target for each class; give Mixing::classes");
  return [fetch = std::move(fetch), options](std::span<const int64_t> numbers, std::span<const uint64_t> seeds) {
    auto batch = fetch(numbers, seeds);
    if (seeds.empty()) return batch;
    Draws draws(~seeds.front());  // others than those of the sample
    const bool cuts = options.cutmix > 0 && (options.mixup == 0 || draws.chance(0.5));
    const double lambda = draw_lambda(cuts ? options.cutmix : options.mixup, draws);
    const ImageSize size{.height = batch.inputs.size(2), .width = batch.inputs.size(3)};
    auto mixed = cuts ? cutmix(batch.inputs, batch.targets, options.classes, draw_cut(size, lambda, draws))
                      : mixup(batch.inputs, batch.targets, options.classes, lambda);
    batch.inputs = std::move(mixed.inputs);
    batch.targets = std::move(mixed.targets);
    return batch;
  };
}

}  // namespace tessera::vision
