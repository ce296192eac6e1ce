// tokenizer.json, as anybody may hand it to us, and texts.
#include "tessera/data/tokenizer.h"
#include "fuzz.h"
#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/data/tokenizer_core.h"

namespace tessera::fuzz {
namespace {

void read_tokenizer(std::span<const uint8_t> data) {
  static const auto path = folder() + "/tokenizer.json";
  write_file(path, data);
  expect_own_errors([&] {
    const auto tokenizer = data::Tokenizer::read(path);
    const auto tokens = tokenizer.encode({reinterpret_cast<const char*>(data.data()), data.size()});
    tokenizer.decode(tokens);
  });
}

std::vector<std::string> seeds_of_tokenizer() {
  std::vector<std::string> all;
  for (const auto* pre : {"gpt2", "llama3", "smollm"}) {
    data::BpeVocabulary vocabulary{
        .tokens = {}, .merges = {"t h", "th e"}, .added = {258}, .special = {258}, .pre = pre, .bos = 258, .add_bos = true};
    for (int byte = 0; byte < 256; byte++) vocabulary.tokens.push_back(data::letter_of(byte));
    vocabulary.tokens.insert(vocabulary.tokens.end(), {"th", "the", "<s>"});
    vocabulary.added = vocabulary.special = {258};
    data::Tokenizer(vocabulary).write(folder());
    all.push_back(InputFile(folder() + "/tokenizer.json").read_all());
  }
  for (const auto* kind : {"llama", "t5"}) {
    data::BpeVocabulary vocabulary{.tokens = {"<unk>", "t", "h", "th", "\u2581"}, .merges = {}, .added = {0}, .special = {0}, .pre = {}, .model = kind};
    vocabulary.unknown = 0;
    vocabulary.scores = {0, -1, -2, -3, -4};
    vocabulary.spaces.merged = true;
    data::Tokenizer(vocabulary).write(folder());
    all.push_back(InputFile(folder() + "/tokenizer.json").read_all());
  }
  return all;
}

const Target target_tokenizer("tokenizer", read_tokenizer, seeds_of_tokenizer);

}  // namespace
}  // namespace tessera::fuzz
