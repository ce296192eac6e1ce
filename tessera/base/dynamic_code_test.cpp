#include "tessera/base/dynamic_code.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

namespace tessera::testing::dynamic_code_test {
namespace {

TEST(DynamicCode, HoldsBlocksOfTinyValues) {
  // 1 / 1e-40 is infinite in float32, as for squares of small gradients.
  for (const auto* code : {&DynamicCode::of_signed(), &DynamicCode::of_unsigned()}) {
    for (const float most : {0.0F, 1e-45F, 1e-40F, 2.9e-39F, 1e-38F, 1e-20F}) {
      const std::vector<float> values = {0, most, most / 2};
      std::vector<uint8_t> codes(values.size());
      std::vector<float> decoded(values.size());
      const auto scale = code->encode(values, codes.data());
      code->decode(codes.data(), scale, decoded);
      for (size_t i = 0; i < values.size(); i++) EXPECT_LE(std::abs(decoded[i] - values[i]), most / 8 + 3e-39F) << most << " " << i;
    }
  }
}

}  // namespace
}  // namespace tessera::testing::dynamic_code_test
