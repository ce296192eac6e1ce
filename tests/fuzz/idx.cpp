// IDX files, packed by gzip or not.
#include <ATen/ATen.h>

#include "fuzz.h"
#include "tessera/data/idx.h"

namespace tessera::fuzz {
namespace {

void read_idx(std::span<const uint8_t> data) {
  static const auto path = folder() + "/file-idx";
  write_file(path, data);
  expect_own_errors([] { data::read_idx(path).sum(); });
}

std::vector<std::string> seeds_of_idx() {
  const auto idx = [](int dimensions, std::initializer_list<uint32_t> sizes, size_t bytes) {
    std::string file = {0, 0, 8, static_cast<char>(dimensions)};
    for (const auto size : sizes) {
      for (int shift = 24; shift >= 0; shift -= 8) file += static_cast<char>(size >> shift);
    }
    return file + std::string(bytes, '\3');
  };
  std::string many = idx(255, {}, 0);
  for (int i = 0; i < 255; i++) many += std::string("\0\0\0\1", 4);
  return {idx(3, {2, 3, 4}, 24),
          idx(1, {5}, 5),
          idx(3, {0, 0xffffffff, 0xffffffff}, 0),
          idx(4, {0, 0xffffffff, 0xffffffff, 0xffffffff}, 0),
          idx(2, {0xffffffff, 0xffffffff}, 1),
          many + "x",
          std::string("\x1f\x8b\x08\0\0\0\0\0\0\x03\x63\x60\xe0\x60\x64\0\0", 17),
          std::string("\0\0\x0d\1\0\0\0\1", 8) + "1234",
          std::string(3, '\0'),
          ""};
}

const Target target_idx("idx", read_idx, seeds_of_idx);

}  // namespace
}  // namespace tessera::fuzz
