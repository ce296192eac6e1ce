// Random numbers that depend on a key and on their position only, so that any part of a tensor can be drawn without the rest.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string_view>

namespace tessera {

/// The key of the `count`th draw for the tensor of this name.
uint64_t key_of(uint64_t seed, std::string_view name, uint64_t count);

/// Fills a flat floating-point tensor with the random numbers of the key from position `begin` on.
void draw_uniform(const at::Tensor& values, double from, double to, uint64_t key, int64_t begin);
void draw_normal(const at::Tensor& values, double mean, double deviation, uint64_t key, int64_t begin);

}  // namespace tessera
