// The files of Accelerate's folders that are no model: a generator's state and the values of a scheduler, beside a model that is whole.
#include "tessera/checkpoint/formats/accelerate.h"

#include <ATen/ATen.h>

#include <fstream>
#include <iterator>

#include "fuzz.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::fuzz {
namespace {

namespace pickle = checkpoint::pickle;

const std::string& state_folder() {
  static const auto path = [] {
    auto result = folder() + "/state";
    std::filesystem::create_directories(result);
    checkpoint::SafetensorsWriter writer(result + "/model.safetensors", {{.name = "w", .dtype = at::kFloat, .sizes = {2}}});
    writer.write(at::ones({2}));
    writer.close();
    return result;
  }();
  return path;
}

void read_accelerate(std::span<const uint8_t> data) {
  for (const auto* name : {"/random_states_0.pkl", "/scheduler.bin"}) write_file(state_folder() + name, data);
  expect_own_errors([] {
    const checkpoint::CatalogReader reader(checkpoint::read_accelerate(state_folder()));
    checkpoint::run_of(reader.catalog());
    for (const auto& checksum : reader.catalog().checksums) reader.verify(checksum);
    for (const auto& [name, tensor] : reader.catalog().tensors) {
      constexpr int64_t kMost = 1 << 24;  // a view may repeat few values as often as it likes
      if (whole_slice(tensor.shape).numel() < kMost) reader.read(name);
    }
  });
}

std::vector<std::string> seeds_of_accelerate() {
  const auto written = [](at::ScalarType dtype, const nlohmann::json& step) {
    const auto path = folder() + "/seed";
    const pickle::Tensor state{.dtype = dtype, .shape = {8}};
    checkpoint::TorchFileWriter writer(
        path, pickle::Dict{{{"step", checkpoint::from_json(step)}, {checkpoint::accelerate::kTorchGenerator, state}}}, 17);
    writer.write(at::ones({8}, dtype));
    writer.close();
    std::ifstream file(path, std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  return {written(at::kByte, 5), written(at::kFloat, nlohmann::json::array({1, "x"})), written(at::kByte, nullptr), "PK\5\6", ""};
}

const Target target_accelerate("accelerate", read_accelerate, seeds_of_accelerate);

}  // namespace
}  // namespace tessera::fuzz
