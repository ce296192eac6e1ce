// Encodes a file by a tokenizer and prints the speed as one line of JSON. bench/tokens runs it, and measures the same with Hugging Face's
// library.
#include <fmt/format.h>
#include <tessera/base/input_file.h>
#include <tessera/llm/gguf_model.h>

#include <cstdio>
#include <ctime>

int main(int argc, char** argv) {
  if (argc != 4) {
    std::fputs("bench_tokenize TOKENIZER TEXT ROUNDS\n", stderr);
    return 2;
  }
  const auto tokenizer = tessera::llm::read_tokenizer(argv[1]);
  const auto text = tessera::InputFile(argv[2]).read_all();
  double best = 1e9;
  size_t tokens = 0;
  for (int round = 0; round < std::atoi(argv[3]); round++) {
    const auto begin = std::clock();
    tokens = tokenizer.encode(text).size();
    best = std::min(best, static_cast<double>(std::clock() - begin) / CLOCKS_PER_SEC);
  }
  fmt::print("{{\"seconds\": {}, \"tokens\": {}, \"bytes\": {}}}\n", best, tokens, text.size());
}
