#include "tessera/base/product_speed.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <chrono>

namespace tessera {

double product_speed(const at::TensorOptions& options, int64_t side) {
  constexpr int kTries = 5;
  constexpr std::chrono::milliseconds kShortest(20);
  using Clock = std::chrono::steady_clock;
  const auto a = at::ones({side, side}, options);
  auto product = at::empty_like(a);
  double best = 0;
  for (int i = 0; i < kTries + 1; i++) {  // the first warms up
    int products = 0;
    const auto begin = Clock::now();
    do {
      at::mm_out(product, a, a);
      product[0][0].item();  // waits for a device
      products++;
    } while (i > 0 && Clock::now() - begin < kShortest);
    const double seconds = std::chrono::duration<double>(Clock::now() - begin).count();
    const auto size = static_cast<double>(side);
    if (i > 0) best = std::max(best, 2 * size * size * size * products / seconds);
  }
  return best;
}

}  // namespace tessera
