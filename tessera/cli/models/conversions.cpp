// The parts of `tessera ckpt convert` for adapters, GGUF files, and descriptions of models.
#include <fmt/format.h>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/cli/ckpt/convert.h"
#include "tessera/llm/gguf_adapter.h"
#include "tessera/llm/gguf_model.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;
using checkpoint::Format;

void convert_adapter(const ConvertCommand& command, const fs::path& place, const std::string& target) {
  const bool from_peft = is_folder(place);
  if (command.options.to != (from_peft ? Format::Gguf : Format::Hub))
    throw ConfigError("{} holds an adapter, which becomes {}", place, from_peft ? "a GGUF file: --to gguf" : "a folder of peft: --to hub");
  if (!from_peft) {
    llm::write_peft_adapter(place, target, command.base);
    fmt::print("{} -> {}: an adapter in a folder of peft\n", place.string(), target);
    return;
  }
  if (command.base.empty())
    throw ConfigError("give --base MODEL, the model that the adapter was trained on: a folder with config.json, or a GGUF file");
  llm::write_gguf_adapter(place, target, command.base);
  print_file(command, place, target, "with an adapter");
}

void write_gguf(const ConvertCommand& command, const fs::path& place, const std::string& target) {
  llm::write_gguf(place, target, {.code = command.code});
  print_file(command, place, target, "in " + command.code);
}

void describe(const ConvertCommand& command, const fs::path& place, const std::string& target) {
  if (llm::has_description(place)) llm::write_description(place, target, command.options.dtype);
}

const AddedConversions conversions({.is_adapter = llm::is_adapter, .convert_adapter = convert_adapter, .write_gguf = write_gguf, .describe = describe});

}  // namespace
}  // namespace tessera::cli
