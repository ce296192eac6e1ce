#include "tessera/shard/deferred/keyed_random.h"

#include <ATen/ATen.h>
#include <ATen/Dispatch.h>
#include <ATen/Parallel.h>
#include <ATen/core/PhiloxRNGEngine.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "tessera/comm/simulation.h"

namespace tessera {
namespace {

constexpr int64_t kLanes = 4;  // numbers that one step of the counter gives

/// Four numbers in [0, 1) of 24 bits, which a float holds without rounding.
using Lanes = std::array<double, kLanes>;

/// Fills the tensor with the numbers of each step of the counter, which `made` transforms in place.
template <class Made>
void fill(const at::Tensor& values, uint64_t key, int64_t begin, Made&& made) {
  if (values.numel() == 0 || Simulation::current() != nullptr) return;
  const auto host = values.is_cpu() ? values : at::empty(values.sizes(), values.options().device(at::kCPU));
  const auto end = begin + host.numel();
  AT_DISPATCH_FLOATING_TYPES_AND2(at::kHalf, at::kBFloat16, host.scalar_type(), "tessera::deferred_init", [&] {
    auto* const target = host.mutable_data_ptr<scalar_t>();
    at::parallel_for(begin / kLanes, (end + kLanes - 1) / kLanes, /*grain_size=*/1 << 12, [&](int64_t first, int64_t last) {
      at::Philox4_32 engine(key, /*subsequence=*/0, static_cast<uint64_t>(first));
      for (auto step = first; step < last; step++) {
        Lanes lanes;
        for (auto& lane : lanes) lane = (engine() >> 8) * 0x1p-24;
        made(lanes);
        for (auto i = std::max(step * kLanes, begin); i < std::min((step + 1) * kLanes, end); i++) {
          target[i - begin] = static_cast<scalar_t>(lanes[static_cast<size_t>(i % kLanes)]);
        }
      }
    });
  });
  if (!values.is_cpu()) at::Tensor(values).copy_(host);
}

}  // namespace

uint64_t key_of(uint64_t seed, std::string_view name, uint64_t count) {
  // FNV-1a over the name, and splitmix64 so that keys of similar names have nothing in common.
  auto key = seed ^ 0xcbf29ce484222325ULL;
  for (const auto character : name) key = (key ^ static_cast<unsigned char>(character)) * 0x100000001b3ULL;
  key += (count + 1) * 0x9e3779b97f4a7c15ULL;
  key = (key ^ key >> 30) * 0xbf58476d1ce4e5b9ULL;
  key = (key ^ key >> 27) * 0x94d049bb133111ebULL;
  return key ^ key >> 31;
}

void draw_uniform(const at::Tensor& values, double from, double to, uint64_t key, int64_t begin) {
  fill(values, key, begin, [&](Lanes& lanes) {
    for (auto& lane : lanes) lane = from + lane * (to - from);
  });
}

void draw_normal(const at::Tensor& values, double mean, double deviation, uint64_t key, int64_t begin) {
  fill(values, key, begin, [&](Lanes& lanes) {
    for (size_t i = 0; i < lanes.size(); i += 2) {
      const auto radius = deviation * std::sqrt(-2 * std::log(1 - lanes[i])), angle = 2 * std::numbers::pi * lanes[i + 1];
      lanes[i] = mean + radius * std::cos(angle);
      lanes[i + 1] = mean + radius * std::sin(angle);
    }
  });
}

}  // namespace tessera
