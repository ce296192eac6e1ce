// `tessera llm generate`.
#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/input_file.h"
#include "tessera/cli/help.h"
#include "tessera/cli/models/llm.h"
#include "tessera/data/unicode.h"

namespace tessera::cli {
namespace {

struct GenerateCommand {
  ModelFlags model;
  SamplingFlags sampling;
  std::string prompt;
  std::filesystem::path prompt_file, prompts, out;

  void expect_sense() const {
    if (!prompt.empty() + !prompt_file.empty() + !prompts.empty() != 1)
      throw ConfigError("give one of --prompt TEXT, --prompt-file FILE, and --prompts FILE with --out FILE");
    if (prompts.empty() != out.empty()) throw ConfigError("--prompts and --out belong together: give both, or neither");
    std::error_code unknown;
    if (std::filesystem::equivalent(prompts, out, unknown)) throw ConfigError("--out {} has the prompts; give another file", out);
  }

  /// Returns the prompts, and refuses a prompt without text.
  std::vector<std::string> texts() const {
    if (!prompt.empty()) return {prompt};
    const auto& file = prompts.empty() ? prompt_file : prompts;
    std::vector<std::string> texts = {InputFile(file).read_all()};
    if (const auto byte = data::invalid_utf8(texts.front())) throw IoError("{}: byte {} is not UTF-8", file, *byte + 1);
    if (!prompts.empty()) {
      texts = CLI::detail::split(texts.front(), '\n');
      for (auto& text : texts) {
        if (text.ends_with('\r')) text.pop_back();
      }
    }
    std::erase(texts, "");
    if (texts.empty()) throw ConfigError("{} is empty, and there is nothing to write after; give a prompt", file);
    return texts;
  }

  int run() const {
    const auto given = texts();
    LanguageModel used(model);
    const auto options = used.options_of(sampling);
    const auto longest = used.config.max_position_embeddings;
    std::vector<std::vector<int64_t>> read;
    for (const auto& text : given) {
      read.push_back(used.encode(text, data::Ends::Added));
      if (std::ssize(read.back()) >= longest)
        throw ConfigError("{} has {} tokens, and the model takes {} with what it writes; give a shorter prompt",
                          given.size() > 1 ? fmt::format("prompt {}", read.size()) : "the prompt", read.back().size(), longest);
    }
    std::ofstream lines;
    if (used.world.is_first() && !out.empty()) {
      lines.open(out);
      if (!lines) throw IoError("{} can't be written: {}", out, std::strerror(errno));
    }
    Answer sum;
    for (size_t i = 0; i < given.size(); i++) {
      auto own = options;
      own.most = std::min(options.most, longest - std::ssize(read[i]));
      own.seed += i;  // equal prompts get different texts
      const auto answer = used.answer(read[i], own, sampling.stops, out.empty() ? used.printing() : [](std::string_view) {});
      if (lines.is_open())
        lines << nlohmann::ordered_json({{"prompt", given[i]}, {"text", answer.text}}).dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
              << std::endl;
      if (!out.empty() && used.world.is_first() && !lines) throw IoError("{} can't be written; is the disk full?", out);
      if (answer.added == own.most && own.most < options.most)
        used.note(fmt::format("the text is at the {} tokens that the model takes", longest));
      sum.count(answer);
    }
    if (out.empty()) used.printing()("\n");
    used.note(speed_of(sum));
    return 0;
  }
};

}  // namespace

void add_llm_generate(CLI::App& command, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand("generate", "Continues texts");
  const auto generate = std::make_shared<GenerateCommand>();
  add_model_flags(*flags, generate->model);
  flags->add_option("--prompt", generate->prompt, "The text to continue")->type_name("TEXT");
  flags->add_option("--prompt-file", generate->prompt_file, "A file with the text to continue")->type_name("FILE");
  flags->add_option("--prompts", generate->prompts, "A file with a text to continue in each line; empty lines are left out")->type_name("FILE");
  flags->add_option("--out", generate->out, "Where to write what continues them, as lines of JSON")->type_name("FILE");
  add_sampling_flags(*flags, generate->sampling, 128);
  flags->footer(Help::footer_of({"tessera llm generate SmolLM2-135M --prompt 'The capital of France is'",
                                 "tessera llm generate my.gguf --prompts a.txt --out b.jsonl --temperature 1"},
                                "Standard output is what the model writes; tokens a second are on standard error."));
  flags->callback([&chosen, generate] {
    generate->expect_sense();
    chosen = [=] { return generate->run(); };
  });
}

}  // namespace tessera::cli
