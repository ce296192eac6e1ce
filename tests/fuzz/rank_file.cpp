// What a rank's file of a checkpoint says of itself: the record in its header, here in front of fixed tensors.
#include <ATen/ATen.h>

#include <filesystem>
#include <nlohmann/json.hpp>

#include "fuzz.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::fuzz {
namespace {

void read_rank_file(std::span<const uint8_t> data) {
  static const auto checkpoint_folder = folder() + "/checkpoint";
  std::filesystem::create_directories(checkpoint_folder);
  {
    checkpoint::SafetensorsWriter writer(
        checkpoint::rank_file(checkpoint_folder, 0, 1),
        {{.name = "w", .dtype = at::kFloat, .sizes = {6}}, {.name = "b", .dtype = at::kFloat, .sizes = {2}}},
        {{"tessera", std::string(reinterpret_cast<const char*>(data.data()), data.size())}});
    writer.write(at::ones({6}));
    writer.write(at::ones({2}));
    writer.close();
  }
  expect_own_errors([] { checkpoint::consolidate(checkpoint_folder, folder() + "/whole.safetensors"); });
  expect_own_errors([] { checkpoint::verify(checkpoint_folder); });
}

std::vector<std::string> seeds_of_rank_file() {
  const auto part = [](std::vector<int64_t> shape, std::vector<int64_t> strides, std::vector<int64_t> offsets, std::vector<int64_t> sizes) {
    return nlohmann::json{{"shape", shape}, {"strides", strides}, {"slices", {{{"offsets", offsets}, {"sizes", sizes}}}}};
  };
  nlohmann::json record = {{"format", 3},
                           {"rank", 0},
                           {"ranks", 1},
                           {"save", 17},
                           {"parts", {{"w", part({2, 3}, {3, 1}, {0, 0}, {2, 3})}}},
                           {"state", nlohmann::json::object()},
                           {"whole", nlohmann::json::array()},
                           {"buffers", {"b"}},
                           {"aliases", {{"tied", "w"}}},
                           {"optimizer", ""},
                           {"notes", {{"step", "1"}}},
                           {"origin", nlohmann::json::object()},
                           {"generator", ""},
                           {"device_generator", ""},
                           {"beside", nlohmann::json::array()},
                           {"by_rank", nlohmann::json::array()},
                           {"base", {{"name", ""}, {"checksum", ""}, {"forms", ""}, {"parameters", nlohmann::json::array()}}},
                           {"adapters", ""}};
  std::vector<std::string> result = {record.dump()};
  const auto changed = [&](const auto& change) {
    auto copy = record;
    change(copy);
    result.push_back(copy.dump());
  };
  constexpr int64_t kHuge = int64_t{1} << 62;
  changed([&](auto& json) { json["parts"]["w"] = part({kHuge, kHuge}, {1, 1}, {0, 0}, {2, 3}); });
  changed([&](auto& json) { json["parts"]["w"] = part({kHuge, 1}, {1, 1}, {0, 0}, {6, 1}); });
  changed([&](auto& json) { json["parts"]["w"] = part({-2, 3}, {3, 1}, {0, 0}, {2, 3}); });
  changed([&](auto& json) { json["parts"]["w"] = part({2, 3}, {-1, kHuge}, {0, 0}, {2, 3}); });
  changed([&](auto& json) { json["parts"]["w"] = part({2, 3}, {3, 1}, {0, 0, 0}, {2, 3}); });
  changed([&](auto& json) { json["parts"]["w"] = part({0, kHuge, kHuge}, {1, 1, 1}, {0, 0, 0}, {0, 1, 1}); });
  changed([&](auto& json) { json["parts"]["w"]["slices"].push_back(json["parts"]["w"]["slices"][0]); });
  changed([&](auto& json) { json["whole"] = {"b", "missing"}; });
  changed([&](auto& json) { json["aliases"] = {{"w", "w"}}; });
  changed([&](auto& json) { json["format"] = 1; });
  result.push_back(std::string(50'000, '['));
  result.push_back("{}");
  result.push_back("");
  return result;
}

const Target target_rank_file("rank_file", read_rank_file, seeds_of_rank_file);

}  // namespace
}  // namespace tessera::fuzz
