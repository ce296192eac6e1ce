// Safetensors files, as anybody may hand them to us.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <cstring>

#include "fuzz.h"
#include "tessera/checkpoint/formats/safetensors.h"

namespace tessera::fuzz {
namespace {

void read_safetensors(std::span<const uint8_t> data) {
  static const auto path = folder() + "/file.safetensors";
  write_file(path, data);
  expect_own_errors([] {
    const checkpoint::SafetensorsFile file(path);
    for (const auto& name : file.names()) {
      file.verify(name);
      file.read(name);
    }
  });
}

std::string file_of(const std::string& header, size_t data_bytes) {
  const uint64_t length = header.size();
  return std::string(reinterpret_cast<const char*>(&length), sizeof length) + header + std::string(data_bytes, '\1');
}

std::string safetensors_written() {
  const auto path = folder() + "/seed";
  checkpoint::SafetensorsWriter writer(
      path, {{.name = "w", .dtype = at::kFloat, .sizes = {2, 3}}, {.name = "b", .dtype = at::kHalf, .sizes = {4}}}, {{"format", "pt"}});
  writer.write(at::ones({2, 3}));
  writer.write(at::ones({4}, at::kHalf));
  writer.close();
  std::string bytes(4096, '\0');
  auto* const file = std::fopen(path.c_str(), "rb");
  bytes.resize(std::fread(bytes.data(), 1, bytes.size(), file));
  std::fclose(file);
  return bytes;
}

std::vector<std::string> seeds_of_safetensors() {
  const auto tensor = [](const std::string& shape, const std::string& offsets) {
    return fmt::format(R"({{"dtype":"F32","shape":{},"data_offsets":{}}})", shape, offsets);
  };
  return {
      safetensors_written(),
      file_of(R"({"__metadata__":{"format":"pt"},"a":)" + tensor("[2,2]", "[0,16]") + R"(,"b":)" + tensor("[]", "[16,20]") + "}", 20),
      file_of(R"({"a":)" + tensor("[0,3]", "[0,0]") + "}", 0),
      file_of(R"({"a":)" + tensor("[4611686018427387904,4611686018427387904,0]", "[0,0]") + "}", 0),
      file_of(R"({"a":)" + tensor("[9223372036854775807,2]", "[0,8]") + "}", 8),
      file_of(R"({"a":)" + tensor("[1]", "[0,4]") + R"(,"a":)" + tensor("[1]", "[4,8]") + "}", 8),
      file_of(R"({"a":)" + std::string(60'000, '[') + "}", 0),
      file_of(R"({"a":{"dtype":)" + std::string(60'000, '[') + "}}", 0),
      file_of(std::string(60'000, '{'), 0),
      file_of("{}", 0),
      file_of("{" + std::string(30'000, ' ') + "}", 0),
      file_of(R"({"__metadata__":{"xxh3_64":""},"a":)" + tensor("[1]", "[0,4]") + "}", 4),
      file_of(R"({"a":{"dtype":"F32","shape":[1.0],"data_offsets":[0,4]}})", 4),
      std::string(8, '\xff'),
      std::string("\x10\0\0\0\0\0\0\0{", 9),
      "",
  };
}

const Target target_safetensors("safetensors", read_safetensors, seeds_of_safetensors);

}  // namespace
}  // namespace tessera::fuzz
