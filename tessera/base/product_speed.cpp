#include "tessera/base/product_speed.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "tessera/base/clock.h"

namespace tessera {

double product_speed(const at::TensorOptions& options, int64_t side) {
  constexpr int kTries = 5;
  constexpr double kShortest = 20e-3;  // seconds
  const auto a = at::ones({side, side}, options);
  auto product = at::empty_like(a);
  double best = 0;
  for (int i = 0; i < kTries + 1; i++) {  // the first warms up
    int products = 0;
    const auto begin = seconds_of_steady_clock();
    double seconds = 0;
    do {
      at::mm_out(product, a, a);
      product[0][0].item();  // waits for a device
      products++;
      seconds = seconds_of_steady_clock() - begin;
    } while (i > 0 && seconds < kShortest);
    if (i > 0) best = std::max(best, 2 * std::pow(static_cast<double>(side), 3) * products / seconds);
  }
  return best;
}

}  // namespace tessera
