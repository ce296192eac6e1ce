// tokenizer.json, as anybody may hand it to us, and texts.
#include "tessera/data/tokenizer.h"
#include "fuzz.h"
#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/data/tokenizer_core.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  static const auto path = fuzz::folder() + "/tokenizer.json";
  fuzz::write_file(path, {data, size});
  fuzz::expect_own_errors([&] {
    const auto tokenizer = data::Tokenizer::read(path);
    const auto tokens = tokenizer.encode({reinterpret_cast<const char*>(data), size});
    tokenizer.decode(tokens);
  });
  return 0;
}

namespace tessera::fuzz {

std::vector<std::string> seeds() {
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
  return all;
}

}  // namespace tessera::fuzz
