// The index of a folder of the Hugging Face Hub, beside two files that are whole.
#include "tessera/checkpoint/formats/hub.h"

#include <ATen/ATen.h>

#include "fuzz.h"
#include "tessera/base/folder.h"

namespace tessera::fuzz {
namespace {

const std::string& hub_folder() {
  static const auto path = [] {
    auto result = folder() + "/hub";
    make_folder(result);
    const auto write = [&](const char* file, const char* name, const at::Tensor& values) {
      checkpoint::SafetensorsWriter writer(result + file, {{.name = name, .dtype = at::kFloat, .sizes = values.sizes().vec()}});
      writer.write(values);
      writer.close();
    };
    write("/model-00001-of-00002.safetensors", "w", at::ones({2, 3}));
    write("/model-00002-of-00002.safetensors", "b", at::ones({2}));
    return result;
  }();
  return path;
}

void read_hub(std::span<const uint8_t> data) {
  write_file(hub_folder() + "/" + checkpoint::kHubSafetensors.index, data);
  expect_own_errors([] {
    const checkpoint::CatalogReader reader(checkpoint::read_hub_folder(hub_folder()));
    for (const auto& [name, tensor] : reader.catalog().tensors) reader.read(name);
  });
}

std::vector<std::string> seeds_of_hub() {
  const std::string whole = R"({"metadata": {"total_size": 32}, "weight_map": {"w": "model-00001-of-00002.safetensors",
                                "b": "model-00002-of-00002.safetensors"}})";
  auto outside = whole;
  outside.replace(outside.find("model-00001"), 5, "../..");
  auto numbered = whole;
  numbered.replace(numbered.find("\"total_size\": 32"), 16, R"("tessera_save": "17")");
  return {whole, numbered, outside, R"({"weight_map": {"w": 1}})", R"({"weight_map": {"w": ""}})", std::string(50'000, '['), "{}", ""};
}

const Target target_hub("hub", read_hub, seeds_of_hub);

}  // namespace
}  // namespace tessera::fuzz
