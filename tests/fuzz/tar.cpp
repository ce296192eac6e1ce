// Tar shards of pictures.
#include "fuzz.h"
#include "tessera/vision/tar_shards.h"
#include "tests/testing/image_files.h"

namespace tessera::fuzz {
namespace {

void read_shards(std::span<const uint8_t> data) {
  static const auto path = folder() + "/shard.tar";
  write_file(path, data);
  expect_own_errors([] {
    const auto images = vision::read_tar_shards({path});
    std::string buffer;
    for (int64_t i = 0; i < images.size(); i++) images.read(i, buffer);
  });
}

std::vector<std::string> seeds_of_shards() {
  using testing::tar_header;
  using testing::tar_member;
  const std::string end(1024, '\0');
  const auto pair = tar_member("a.jpg", "picture") + tar_member("a.cls", "3");
  return {pair + end,
          tar_member("x", "14 path=a.png\n10 size=3\n", 'x') + tar_member("b.jpg", "abc") + tar_member("a.cls", "3") + end,
          tar_member("././@LongLink", "a.png", 'L') + pair + end,
          tar_header("a.jpg", "\x80" + std::string(11, '\xff')) + end,
          tar_header("a.jpg", "77777777777") + end,
          tar_member("a", "", '2') + end,
          "\x1f\x8b" + end,
          end,
          ""};
}

const Target target_tar("tar", read_shards, seeds_of_shards);

}  // namespace
}  // namespace tessera::fuzz
