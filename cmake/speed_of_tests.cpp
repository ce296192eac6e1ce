// Does a fixed piece of work of the kinds that tests do, five times, and prints how many milliseconds the slowest took.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

namespace {

/// Numbers and text, in the cache and beyond it. Returns something that depends on all of it, so that nothing is left out.
double work() {
  constexpr size_t kSize = 160;
  std::vector<float> a(kSize * kSize, 0.5F), b(kSize * kSize, 0.25F), c(kSize * kSize);
  for (int pass = 0; pass < 4; pass++) {
    for (size_t i = 0; i < kSize; i++) {
      for (size_t k = 0; k < kSize; k++) {
        for (size_t j = 0; j < kSize; j++) c[i * kSize + j] += a[i * kSize + k] * b[k * kSize + j];
      }
    }
  }
  std::map<std::string, int> names;
  uint32_t drawn = 1;
  for (int i = 0; i < 20'000; i++) names[std::to_string(drawn = drawn * 1'664'525 + 1'013'904'223)]++;
  std::vector<uint32_t> numbers(1 << 21);
  for (auto& number : numbers) number = drawn = drawn * 1'664'525 + 1'013'904'223;
  std::nth_element(numbers.begin(), numbers.begin() + (1 << 20), numbers.end());
  return c[7] + static_cast<double>(names.size()) + numbers[1 << 20];
}

}  // namespace

int main() {
  double slowest = 0, sum = 0;
  for (int run = 0; run < 5; run++) {
    const auto begin = std::chrono::steady_clock::now();
    sum += work();
    slowest = std::max(slowest, std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count());
  }
  std::printf("%.0f\n", slowest + (sum < 0 ? 1 : 0));
}
