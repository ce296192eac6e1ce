// `tessera data`: makes files to train on.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/help.h"
#include "tessera/cli/models/llm.h"
#include "tessera/cli/packages.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/token_file.h"
#include "tessera/llm/tokenize.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

/// Flags of commands that read texts.
struct Texts {
  std::vector<fs::path> inputs;
  fs::path tokenizer;
  std::string chat, end;
  llm::TokenizeOptions options;

  void add_flags(CLI::App& flags) {
    flags.add_option("FILE", inputs, R"(A text (.txt, .md), or objects of JSON with text, messages or the like)")->required();
    flags.add_option("--tokenizer", tokenizer, "The tokenizer: a folder with tokenizer.json and config.json, or a GGUF file")
        ->type_name("PATH")
        ->required();
    add_chat_flag(flags, chat);
    add_end_flag(flags, end);
  }

  /// Reads the tokenizer, and fills `options`.
  data::Tokenizer read() {
    auto known = llm::read_tokenizer(tokenizer);
    options.end = end_token(end, known, tokenizer);
    if (const auto found = chat_template(chat, tokenizer)) options.chat = std::make_shared<llm::ChatTemplate>(*found);
    return known;
  }
};

/// "3 tokens, of which 1 is learned"
std::string tokens_and_learned(int64_t tokens, int64_t learned) {
  return fmt::format("{}, of which {} {} learned", counted(tokens, "token"), learned, learned == 1 ? "is" : "are");
}

struct TokenizeCommand : Texts {
  fs::path out;

  int run() {
    const auto known = read();
    options.progress = [bar = megabyte_bar("tokenizing")](uint64_t done, uint64_t all) {
      bar("", static_cast<int64_t>(done), static_cast<int64_t>(all));
      return true;
    };
    const auto made = llm::tokenize(inputs, out, known, options);
    options.progress = {};
    if (made.trained == 0) fmt::print(stderr, "warning: no token of {} is learned, so a model can't be trained on it\n", out.string());
    fmt::print("{}: {}, {}{}\n", out.string(), counted(made.documents, "document"), tokens_and_learned(made.tokens, made.trained),
               made.found > 0 ? fmt::format("; {} of {} were there from an earlier run", counted(made.found, "part"), out.string()) : "");
    return 0;
  }
};

/// Prints the first documents with their learned tokens in colour or, without colours, in ⟦ ⟧.
struct PreviewCommand : Texts {
  int64_t rows = 3;

  int run() {
    const auto known = read();
    int64_t number = 0;
    for (const auto& input : inputs) {
      llm::each_document(input, known, options, [&](std::span<const int32_t> tokens) {
        if (number >= rows) return false;
        const auto learned = std::ranges::count_if(tokens, [](int32_t token) { return !llm::is_only_read(token); });
        const auto text = coloured(tokens, known);
        fmt::print("{}document {}: {}\n{}{}", number > 0 ? "\n" : "", number + 1, tokens_and_learned(std::ssize(tokens), learned), text,
                   text.ends_with('\n') ? "" : "\n");
        number++;
        return true;
      });
    }
    if (number == 0) throw IoError("there are no documents to show; give files that are not empty");
    return 0;
  }

  static std::string coloured(std::span<const int32_t> tokens, const data::Tokenizer& known) {
    const bool colour = Help::has_colour();
    const auto is_special = [&](int32_t token) {
      return known.decode({&token, 1}).empty() && !known.decode({&token, 1}, data::Tokenizer::Special::Shown).empty();
    };
    std::string text;
    for (size_t begin = 0, end = 0; begin < tokens.size(); begin = end) {
      const bool read = llm::is_only_read(tokens[begin]), special = is_special(llm::token_of(tokens[begin]));
      std::vector<int32_t> run;
      for (;
           end < tokens.size() && llm::is_only_read(tokens[end]) == read && (!colour || is_special(llm::token_of(tokens[end])) == special);
           end++)
        run.push_back(llm::token_of(tokens[end]));
      const auto part = printable(known.decode(run, data::Tokenizer::Special::Shown), "\n\t");
      if (!colour) {
        text += read ? part : "⟦" + part + "⟧";
      } else {
        text += fmt::format("\x1b[{}{}m{}\x1b[0m", special ? "2;" : "", read ? 39 : 32, part);
      }
    }
    return text;
  }
};

void add_data(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("data", "Makes files to train on")->require_subcommand(1);
  command->footer(Help::footer_of({"tessera data tokenize texts.jsonl --tokenizer SmolLM2-135M --out texts.tokens"}));
  auto* flags = command->add_subcommand("tokenize", "Turns texts into a file of tokens");
  const auto tokenize = std::make_shared<TokenizeCommand>();
  tokenize->add_flags(*flags);
  flags->add_option("--out", tokenize->out, "The file to write")->type_name("FILE")->required();
  flags->add_option("--threads", tokenize->options.threads, "How many threads; as many as there are cores unless given")
      ->check(from_to(1, 4096));
  flags->footer(Help::footer_of({"tessera data tokenize notes.txt --tokenizer SmolLM2-135M --out notes.tokens",
                                 "tessera data tokenize *.jsonl --tokenizer my.gguf --chat chatml --out x.tokens"}));
  flags->callback([&chosen, tokenize] { chosen = [=] { return tokenize->run(); }; });

  flags = command->add_subcommand("preview", "Shows which tokens of texts, or of a file of tokens, are learned");
  const auto preview = std::make_shared<PreviewCommand>();
  preview->add_flags(*flags);
  flags->add_option("--rows", preview->rows, "How many documents")->check(from_to(1, 1'000'000));
  flags->footer(Help::footer_of({"tessera data preview chats.jsonl --tokenizer SmolLM2-135M --rows 1"}));
  flags->callback([&chosen, preview] { chosen = [=] { return preview->run(); }; });
}

const AddedCommand data_command("data", add_data);

}  // namespace
}  // namespace tessera::cli
