#include "tessera/data/samples.h"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <fmt/format.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tessera/base/error.h"

namespace tessera::data {

std::string fingerprint(const Samples& all) {
  uint64_t print = 0;
  for (const auto& rows : {all.inputs, all.targets}) {
    if (!rows.defined()) continue;
    const auto bytes = rows.detach().cpu().contiguous();
    const auto form = fmt::format("{} {}", c10::toString(bytes.scalar_type()), c10::str(bytes.sizes()));
    print = XXH3_64bits_withSeed(form.data(), form.size(), print);
    print = XXH3_64bits_withSeed(bytes.const_data_ptr(), bytes.nbytes(), print);
  }
  return fmt::format("samples {:016x}", print);
}

Samples pick(const Samples& all, std::span<const int64_t> numbers) {
  // The const_cast is safe, because the tensor is only read.
  const auto index = at::from_blob(const_cast<int64_t*>(numbers.data()), {static_cast<int64_t>(numbers.size())}, at::kLong);
  return {.inputs = all.inputs.index_select(0, index), .targets = all.targets.index_select(0, index)};
}

Samples fake_images(const FakeImages& options) {
  if (options.count < 0 || options.height < 1 || options.width < 1 || options.classes < 1 || options.classes > 256) {
    throw UsageError("fake images: {} images of {} x {} in {} classes can't be made; classes are bytes, so 1 to 256", options.count,
                     options.height, options.width, options.classes);
  }
  // Draws integers only, because floats may differ between machines.
  auto of_patterns = at::detail::createCPUGenerator(options.seed);
  auto of_split = at::detail::createCPUGenerator(options.seed * 2 + (options.split == Split::Train ? 1 : 2));
  const auto bytes = at::TensorOptions(at::kCPU).dtype(at::kByte);
  const auto patterns = at::randint(0, 192, {options.classes, options.height, options.width}, of_patterns, bytes);
  const auto targets = at::randint(0, options.classes, {options.count}, of_split, bytes);
  const auto noise = at::randint(0, 64, {options.count, options.height, options.width}, of_split, bytes);
  return {.inputs = patterns.index_select(0, targets.to(at::kLong)) + noise, .targets = targets};
}

}  // namespace tessera::data
