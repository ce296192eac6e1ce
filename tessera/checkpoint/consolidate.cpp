#include "tessera/checkpoint/consolidate.h"

#include <ATen/ATen.h>
#include <c10/util/FunctionRef.h>
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {

void expect_known_ending(const std::filesystem::path& save_path) {
  if (!has_torch_extension(save_path)) expect_ending_of(save_path, Format::Safetensors);
}

Converted consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path, const ConvertProgress& progress) {
  expect_known_ending(save_path);
  const bool torch = has_torch_extension(save_path);
  auto done = convert(
      checkpoint, save_path,
      {.to = torch ? Format::Torch : Format::Safetensors, .weights_only = true, .model_key = torch ? "model" : "", .progress = progress});
  warn_of_tensors_beside(checkpoint, done);
  return done;
}

Converted consolidate(const std::filesystem::path& checkpoint, const std::filesystem::path& save_path, const Communicator& world) {
  Converted result;
  const auto together = [&](c10::function_ref<void()> act) {
    AllOrNone step;
    step.attempt(act);
    step.expect_all(world, {.unit = "consolidation"}, fmt::format("could not consolidate {}", checkpoint.string()));
  };
  together([&] {
    if (world.is_first()) result = consolidate(checkpoint, save_path);
  });
  together([&] {
    if (is_there(save_path)) return;
    throw IoError("{}, which rank 0 has written, is not there for another rank; give all ranks the same path, where all see the same files",
                  save_path);
  });
  const auto options = at::TensorOptions(world.traits().device).dtype(at::kLong);
  const auto numbers = at::tensor({result.parameters, result.tensors, result.bytes}, options);
  world.broadcast(numbers, 0, {.unit = "consolidation"}).wait();
  const auto known = numbers.cpu();
  const auto* const values = known.const_data_ptr<int64_t>();
  result.files = {save_path};
  result.parameters = values[0];
  result.tensors = values[1];
  result.bytes = values[2];
  return result;
}

}  // namespace tessera::checkpoint
