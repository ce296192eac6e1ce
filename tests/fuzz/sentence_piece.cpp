// tokenizer.model, as anybody may hand it to us.
#include "fuzz.h"
#include "tessera/data/tokenizer.h"

namespace tessera::fuzz {
namespace {

void read_sentence_piece_model(std::span<const uint8_t> data) {
  static const auto path = folder() + "/tokenizer.model";
  write_file(path, data);
  expect_own_errors([&] { data::Tokenizer::read(path).encode("the text"); });
}

std::vector<std::string> seeds_of_model() {
  using namespace std::string_literals;
  return {"\x0a\x0e\x0a\x05<unk>\x15\0\0\0\0\x18\x02\x0a\x08\x0a\x01t\x15\0\0\0\xbf\x12\x02\x18\x02\x1a\x04\x18\0\x20\0"s};
}

const Target target_sentence_piece("sentence_piece", read_sentence_piece_model, seeds_of_model);

}  // namespace
}  // namespace tessera::fuzz
