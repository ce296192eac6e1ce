// manifest.json of a checkpoint, beside a rank's file that is whole.
#include <ATen/ATen.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

#include "fuzz.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/verify.h"

namespace tessera::fuzz {
namespace {

std::string checkpoint_folder() {
  static const auto path = fuzz::folder() + "/checkpoint";
  static const bool made = [] {
    std::filesystem::create_directories(path);
    const checkpoint::PartRecord part{.shape = {2, 3}, .strides = {3, 1}, .slices = {whole_slice({2, 3})}};
    checkpoint::SafetensorsWriter writer(
        checkpoint::rank_file(path, 0, 1),
        {{.name = "w", .dtype = at::kFloat, .sizes = {6}}, {.name = "b", .dtype = at::kFloat, .sizes = {2}}},
        checkpoint::to_metadata({.save = 17, .parts = {{"w", part}}, .buffers = {"b"}, .notes = {{"step", "1"}}}));
    writer.write(at::ones({6}));
    writer.write(at::ones({2}));
    writer.close();
    return true;
  }();
  (void)made;
  return path;
}

void read_manifest(std::span<const uint8_t> data) {
  // Makes the checksum fit the changed content, so that the rest of it is read.
  auto content = nlohmann::json::parse(data.begin(), data.end(), nullptr, false);
  if (!content.is_object()) return;
  content.erase("xxh3_64");
  content["xxh3_64"] = checkpoint::checksum_of(content.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
  const auto text = content.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
  write_file(checkpoint_folder() + "/manifest.json", {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
  expect_own_errors([] { checkpoint::verify(checkpoint_folder()); });
  expect_own_errors([] { checkpoint::read_manifest(checkpoint_folder()); });
}

std::vector<std::string> seeds_of_manifest() {
  std::filesystem::remove(checkpoint_folder() + "/manifest.json");
  checkpoint::write_manifest(checkpoint_folder(), checkpoint::manifest_of_files(checkpoint_folder(), 1));
  std::ifstream file(checkpoint_folder() + "/manifest.json");
  auto whole = nlohmann::json::parse(file);
  std::vector<std::string> result = {whole.dump()};
  const auto changes = nlohmann::json::object({{"offset", -1}, {"sizes", {int64_t{1} << 62, 3}}, {"strides", {-1, int64_t{1} << 62}}});
  for (const auto& [key, value] : changes.items()) {
    auto copy = whole;
    copy["tensors"]["w"]["boxes"][0][key] = value;
    result.push_back(copy.dump());
  }
  return result;
}

const Target target_manifest("manifest", read_manifest, seeds_of_manifest);

}  // namespace
}  // namespace tessera::fuzz
