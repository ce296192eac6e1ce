#include "tessera/base/dynamic_code.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "tessera/base/kernel.h"

namespace tessera {
namespace {

constexpr int kExponents = 7;

/// Returns 0, 1 and, for each power of ten from 1e-6 to 1, the middles of equal steps between a tenth of that power and the power; if
/// signed, also the negated middles. The smallest power has one step, or two if unsigned, and each further power has twice as many steps as
/// the one before. Uses the operators that bitsandbytes uses, so that the bits are the same.
std::vector<float> values_of(bool is_signed) {
  std::vector<float> all = {0, 1};
  for (int i = 0; i < kExponents; i++) {
    const auto bounds = at::linspace(0.1, 1, (int64_t{1} << (is_signed ? i : i + 1)) + 1, at::kFloat);
    const auto middles = (bounds.slice(0, 0, -1) + bounds.slice(0, 1)) / 2.0;
    const auto scaled = middles * std::pow(10.0, i - (kExponents - 1));
    for (int64_t k = 0; k < scaled.numel(); k++) {
      const auto value = scaled[k].item<float>();
      all.push_back(value);
      if (is_signed) all.push_back(-value);
    }
  }
  std::ranges::sort(all);
  return all;
}

}  // namespace

DynamicCode::DynamicCode(bool is_signed) {
  const auto all = values_of(is_signed);
  std::ranges::copy(all, values_.begin());
  size_t code = 0;
  for (size_t i = 0; i < code_of_.size(); i++) {
    const float place = -1.0F + 2.0F * static_cast<float>(i) / 65535.0F;
    while (code + 1 < values_.size() && (values_[code] + values_[code + 1]) / 2 < place) code++;
    code_of_[i] = static_cast<uint8_t>(code);
  }
}

const DynamicCode& DynamicCode::of_signed() {
  static const DynamicCode code(true);
  return code;
}

const DynamicCode& DynamicCode::of_unsigned() {
  static const DynamicCode code(false);
  return code;
}

TESSERA_KERNEL void DynamicCode::decode(const uint8_t* codes, float scale, std::span<float> values) const {
  for (size_t i = 0; i < values.size(); i++) values[i] = values_[codes[i]] * scale;
}

TESSERA_KERNEL float DynamicCode::encode(std::span<const float> values, uint8_t* codes) const {
  float most = 0;
  bool finite = true;
  for (const float value : values) {
    most = std::max(most, std::abs(value));
    finite = finite && std::isfinite(value);
  }
  if (!finite) {
    std::fill_n(codes, values.size(), uint8_t{255});
    return std::numeric_limits<float>::quiet_NaN();
  }
  const float factor = 1 / most;
  if (!std::isfinite(factor)) {  // all values are 0, or so small that they count as 0
    std::fill_n(codes, values.size(), uint8_t{0});
    return 0;
  }
  for (const float value : values) {
    const float place = (std::clamp(value * factor, -1.0F, 1.0F) + 1) * 0.5F * 65535;
    *codes++ = code_of_[static_cast<size_t>(place + 0.5F)];
  }
  return most;
}

}  // namespace tessera
