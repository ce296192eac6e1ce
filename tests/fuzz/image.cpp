// Pictures of the three formats, their parts, and the orientation in their Exif.
#include <ATen/ATen.h>

#include "fuzz.h"
#include "tessera/vision/fetch_images.h"
#include "tessera/vision/image.h"

namespace tessera::fuzz {
namespace {

void read_picture(std::span<const uint8_t> data) {
  const std::string_view bytes(reinterpret_cast<const char*>(data.data()), data.size());
  const auto place = at::empty({3, 8, 8});
  expect_own_errors([&] {
    const auto [height, width] = vision::size_of_image(bytes, "picture");
    constexpr int64_t kMost = 1 << 16;  // larger ones are pictures, too, and take their time
    if (height * width > kMost) return;
    expect_own_errors([&] { vision::apply(vision::TrainTransform{.crop = {.size = 8}, .may_shrink = true}, bytes, "picture", 1, place); });
    expect_own_errors([&] { vision::apply(vision::TestTransform{.shorter_side = 9, .size = 8}, bytes, "picture", place); });
    const vision::Box part{.top = height / 3, .left = width / 3, .height = 1 + height / 3, .width = 1 + width / 3};
    for (const int64_t least : {0, 2}) {
      expect_own_errors([&] { vision::decode_image(bytes, "picture", {.may_shrink_to = least, .exif_orientation = true}); });
      expect_own_errors([&] { vision::decode_image(bytes, "picture", {.part = part, .may_shrink_to = least}); });
    }
  });
}

std::string from_hex(std::string_view text) {
  std::string bytes;
  for (size_t i = 0; i < text.size(); i += 2) bytes += static_cast<char>(std::stoi(std::string(text.substr(i, 2)), nullptr, 16));
  return bytes;
}

/// As Pillow has written them: JPEGs in grey, progressive with an orientation, and in CMYK; a PNG with an orientation, and one with a
/// palette; a WebP without losses, and one with losses, transparency and an orientation.
std::vector<std::string> seeds_of_image() {
  std::vector<std::string> seeds = {"", "GIF89a"};
  for (const auto* const text :
       {"ffd8ffe000104a46494600010100000100010000ffdb004300281c1e231e19282321232d2b28303c64413c37373c7b585d4964918099968f808c8aa0"
        "b4e6c3a0aadaad8a8cc8ffcbdaeef5ffffff9bc1fffffffaffe6fdfff8ffc0000b080008000801011100ffc400140001000000000000000000000000"
        "00000004ffc400161000030000000000000000000000000000000441ffda0008010100003f000ab0ffd9",
        "ffd8ffe000104a46494600010100000100010000ffe100224578696600004d4d002a00000008000101120003000000010006000000000000ffdb0043"
        "0050373c463c32504641465a55505f78c882786e6e78f5afb991c8ffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffdb004301555a5a786978eb8282ebffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffc20011080010001003012200021101031101ffc4001500010100000000000000000000000000000203ffc40014"
        "010100000000000000000000000000000000ffda000c030100021003100000019a4cffc40014100100000000000000000000000000000020ffda0008"
        "0101000105021fffc4001511010100000000000000000000000000000100ffda0008010301013f011bffc40014110100000000000000000000000000"
        "000000ffda0008010201013f017fffc40014100100000000000000000000000000000020ffda0008010100063f021fffc40015100101000000000000"
        "00000000000000000100ffda0008010100013f21082082ffda000c03010002000300000010e3ffc40014110100000000000000000000000000000000"
        "ffda0008010301013f107fffc4001511010100000000000000000000000000000100ffda0008010201013f101bffc400141001000000000000000000"
        "00000000000020ffda0008010100013f100abfffd9",
        "ffd8ffee000e41646f626500640000000000ffdb00430050373c463c32504641465a55505f78c882786e6e78f5afb991c8ffffffffffffffffffffff"
        "ffffffffffffffffffffffffffffffffffffffffffffffffffffffffc000140800080008044311004d11005911004b1100ffc4001400010000000000"
        "0000000000000000000003ffc40017100101010100000000000000000000000000020313ffda000e0443004d0059004b00003f007d4fd4f747d5ffd9",
        "89504e470d0a1a0a0000000d4948445200000003000000030802000000d94a22e80000001a655849664d4d002a000000080001011200030000000100"
        "06000000000000d6674b690000001c49444154789c636460601060e01060e0606110e06060e06040660100087c008a44144f120000000049454e44ae"
        "426082",
        "89504e470d0a1a0a0000000d4948445200000008000000080203000000b96156180000000c504c544538604c3838385010301010107cc501dc000000"
        "1c49444154789c63fcbf9ae93f03d37f06a61f1b981efc66086180000077b80789c09b100a0000000049454e44ae426082",
        "524946462c000000574542505650384c200000002f07c00100b98ce87fec0a518882f73f2024204cf07fafe6c040444c00d8de00",
        "524946468c00000057454250565038580a00000018000000070000070000414c50481e000000013f20104842d89f778888481d84d9460a6319cb58ce"
        "ff7b0611fd0f6c1f56503820260000009001009d012a080008000900ac258800029994400000fecc12931074f52fd431a69cb74e0000455849461a00"
        "00004d4d002a00000008000101120003000000010006000000000000"}) {
    seeds.push_back(from_hex(text));
  }
  return seeds;
}

const Target target_image("image", read_picture, seeds_of_image);

}  // namespace
}  // namespace tessera::fuzz
