// The index of a folder of the Hugging Face Hub, beside two files that are whole.
#include "tessera/checkpoint/formats/hub.h"

#include <ATen/ATen.h>

#include <fstream>
#include <iterator>

#include "fuzz.h"

namespace {

using namespace tessera;

const std::string& hub_folder() {
  static const auto path = [] {
    auto result = fuzz::folder() + "/hub";
    checkpoint::HubWriter writer(
        result, {{.name = "w", .dtype = at::kFloat, .sizes = {2, 3}}, {.name = "b", .dtype = at::kFloat, .sizes = {2}}}, {}, 24);
    writer.write(at::ones({2, 3}));
    writer.write(at::ones({2}));
    writer.close();
    return result;
  }();
  return path;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  fuzz::write_file(hub_folder() + "/" + checkpoint::kHubSafetensors.index, {data, size});
  fuzz::expect_own_errors([] {
    const checkpoint::CatalogReader reader(checkpoint::read_hub_folder(hub_folder()));
    for (const auto& [name, tensor] : reader.catalog().tensors) reader.read(name);
  });
  return 0;
}

namespace tessera::fuzz {

std::vector<std::string> seeds() {
  std::ifstream file(hub_folder() + "/" + checkpoint::kHubSafetensors.index);
  const std::string whole(std::istreambuf_iterator<char>(file), {});
  auto outside = whole;
  outside.replace(outside.find("model-00001"), 5, "../..");
  return {whole, outside, R"({"weight_map": {"w": 1}})", R"({"weight_map": {"w": ""}})", std::string(50'000, '['), "{}", ""};
}

}  // namespace tessera::fuzz
