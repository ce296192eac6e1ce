// The `.metadata` of a folder of torch.distributed.checkpoint, beside fixed files.
#include "tessera/checkpoint/formats/dcp/dcp.h"

#include <ATen/ATen.h>

#include <fstream>
#include <iterator>

#include "fuzz.h"
#include "tessera/checkpoint/stored/runs.h"

namespace tessera::fuzz {
namespace {

std::string dcp_folder() {
  auto path = folder() + "/dcp";
  std::filesystem::create_directories(path);
  return path;
}

const std::vector<checkpoint::DcpItem>& items() {
  static const auto all = [] {
    checkpoint::DcpRankWriter writer(dcp_folder(), 0);
    for (const int64_t row : {0, 1})
      writer.write({"model", "w"}, {.shape = {2, 3}, .offsets = {row, 0}, .sizes = {1, 3}}, at::ones({1, 3}));
    writer.write({"model", "step"}, whole_slice({}), at::ones({}, at::kLong));
    writer.write({"groups", int64_t{0}, "lr"}, 0.5);
    return writer.close();
  }();
  return all;
}

std::vector<std::string> seeds_of_dcp() {
  const auto written = [](std::span<const checkpoint::DcpItem> some) {
    checkpoint::write_dcp_metadata(dcp_folder(), some);
    std::ifstream file(dcp_folder() + "/.metadata", std::ios::binary);
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  // Content that is changed behind a checksum is not read, so most seeds have no checksums.
  const auto unchecked = [&](std::span<const checkpoint::DcpItem> some) {
    auto text = written(some);
    return text.replace(text.find("tessera"), 7, "another");
  };
  const std::span all(items());
  return {unchecked(all), unchecked(all.first(2)), unchecked(all.last(1)), unchecked({}), written(all), ""};
}

void read_dcp(std::span<const uint8_t> data) {
  items();
  static const auto path = dcp_folder();
  write_file(path + "/.metadata", data);
  expect_own_errors([] {
    const checkpoint::CatalogReader reader(checkpoint::read_dcp(path));
    checkpoint::run_of(reader.catalog());
    for (const auto& checksum : reader.catalog().checksums) reader.verify(checksum);
    for (const auto& [name, tensor] : reader.catalog().tensors) reader.read(name);
  });
}

const Target target_dcp("dcp", read_dcp, seeds_of_dcp);

}  // namespace
}  // namespace tessera::fuzz
