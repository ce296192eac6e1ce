// `tessera data`: makes files to train on.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/flags.h"
#include "tessera/cli/help.h"
#include "tessera/cli/packages.h"
#include "tessera/llm/gguf_model.h"
#include "tessera/llm/token_file.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

struct TokenizeCommand {
  std::vector<fs::path> inputs;
  fs::path tokenizer, out;
  std::string chat, end;
  llm::TokenizeOptions options;

  /// Returns the token that ends a document: the token of --end, or else the token with which the model's texts end.
  std::optional<int32_t> end_of_document(const data::Tokenizer& known) const {
    if (end == "none") return {};
    if (!end.empty()) {
      const auto id = known.find(end);
      if (!id) throw ConfigError("--end {}: the tokenizer has no such token", printable(end));
      return id;
    }
    if (is_folder(tokenizer) && !is_there(tokenizer / "config.json"))
      throw ConfigError("{} has no config.json that says with which token texts end; give --end TOKEN, or --end none", tokenizer);
    const auto config = llm::read_config(tokenizer);
    if (config.eos_token_ids.empty()) return {};
    return static_cast<int32_t>(config.eos_token_ids.front());
  }

  int run() {
    const auto known = llm::read_tokenizer(tokenizer);
    options.end = end_of_document(known);
    if (!chat.empty()) options.chat = llm::chat_template_named(chat);
    options.progress = [bar = megabyte_bar("tokenizing")](uint64_t done, uint64_t all) {
      bar("", static_cast<int64_t>(done), static_cast<int64_t>(all));
      return true;
    };
    const auto made = llm::tokenize(inputs, out, known, options);
    options.progress = {};
    if (made.trained == 0) fmt::print(stderr, "warning: no token of {} is learned, so a model can't be trained on it\n", out.string());
    fmt::print("{}: {}, {}, of which {} are learned{}\n", out.string(), counted(made.documents, "document"), counted(made.tokens, "token"),
               made.trained,
               made.found > 0 ? fmt::format("; {} of {} were there from an earlier run", counted(made.found, "part"), out.string()) : "");
    return 0;
  }
};

void add_data(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("data", "Makes files to train on")->require_subcommand(1);
  command->footer(Help::footer_of({"tessera data tokenize texts.jsonl --tokenizer SmolLM2-135M --out texts.tokens"}));
  auto* flags = command->add_subcommand("tokenize", "Turns texts into a file of tokens");
  const auto tokenize = std::make_shared<TokenizeCommand>();
  flags->add_option("FILE", tokenize->inputs, R"(A text (.txt, .md), or lines of {"text"}, {"prompt", "completion"} or {"messages": [{"role", "content"}]})")
      ->required();
  flags->add_option("--tokenizer", tokenize->tokenizer, "The tokenizer: a folder with tokenizer.json and config.json, or a GGUF file")
      ->type_name("PATH")
      ->required();
  flags->add_option("--out", tokenize->out, "The file to write")->type_name("FILE")->required();
  flags->add_option("--chat", tokenize->chat, "The template by which messages become text")->check(one_of({"chatml", "llama3", "alpaca"}));
  flags->add_option("--end", tokenize->end, "The token that ends a document, or none; that of the model unless given")->type_name("TOKEN");
  flags->add_option("--threads", tokenize->options.threads, "How many threads; as many as there are cores unless given")->check(from_to(1, 4096));
  flags->footer(Help::footer_of({"tessera data tokenize notes.txt --tokenizer SmolLM2-135M --out notes.tokens",
                                 "tessera data tokenize *.jsonl --tokenizer my.gguf --chat chatml --out x.tokens"}));
  flags->callback([&chosen, tokenize] { chosen = [=] { return tokenize->run(); }; });
}

const AddedCommand data_command("data", add_data);

}  // namespace
}  // namespace tessera::cli
