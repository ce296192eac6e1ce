// Compares lists of tensors by their bits.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <map>
#include <string>
#include <vector>

namespace tessera::testing {

/// Whether two tensors, wherever they lie, have the same values.
inline bool same_values(const at::Tensor& one, const at::Tensor& other) {
  return at::equal(one.to(other.device()), other);
}

inline void expect_same(const std::map<std::string, at::Tensor>& actual, const std::map<std::string, at::Tensor>& expected) {
  EXPECT_EQ(actual.size(), expected.size());
  for (const auto& [name, tensor] : expected) {
    ASSERT_TRUE(actual.contains(name)) << name;
    ASSERT_EQ(actual.at(name).scalar_type(), tensor.scalar_type()) << name;
    EXPECT_TRUE(same_values(actual.at(name), tensor)) << name;
  }
}

inline void expect_same(const std::vector<at::Tensor>& actual, const std::vector<at::Tensor>& expected) {
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); i++) EXPECT_TRUE(same_values(actual[i], expected[i])) << i;
}

}  // namespace tessera::testing
