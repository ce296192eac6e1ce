// `tessera ckpt merge-adapter`.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <memory>

#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/help.h"
#include "tessera/cli/packages.h"
#include "tessera/llm/gguf_model.h"

namespace tessera::cli {
namespace {

struct MergeAdapterCommand {
  std::string base, adapter, out;
  int64_t max_shard_size = 5'000'000'000;

  int run() const {
    const auto place = resolve_checkpoint(base);
    const std::filesystem::path target = without_slashes(out);
    const auto files = checkpoint::merge_adapter(place, without_slashes(adapter), target, max_shard_size);
    if (llm::has_description(place)) llm::write_description(place, target);
    fmt::print("{} + {} -> {}\n", place.string(), adapter, files.size() == 1 ? files.front().string() : target.string());
    return 0;
  }
};

void add_merge_adapter(CLI::App& command, std::function<int()>& chosen) {
  auto* flags = command.add_subcommand("merge-adapter", "Merges an adapter of LoRA or DoRA into the weights of its model");
  const auto merge = std::make_shared<MergeAdapterCommand>();
  flags->add_option("MODEL", merge->base, "The model that the adapter was trained on: a folder or a file of any format")->required();
  flags->add_option("ADAPTER", merge->adapter, "A folder of peft: adapter_config.json and adapter_model.safetensors, or .bin")->required();
  flags->add_option("OUT", merge->out, "The folder for model.safetensors")->required();
  add_value(*flags, "--max-shard-size", merge->max_shard_size, bytes_of,
            "The largest file; if the model is larger, there are several and an index")
      ->type_name("SIZE")
      ->default_str("5GB");
  flags->footer(Help::footer_of({"tessera ckpt merge-adapter SmolLM2-135M run/adapter merged"}));
  flags->callback([&chosen, merge] {
    for (const auto* from : {&merge->base, &merge->adapter}) expect_apart(*from, merge->out);
    chosen = [=] { return merge->run(); };
  });
}

const AddedCommand merge_adapter_command("merge-adapter", add_merge_adapter);

}  // namespace
}  // namespace tessera::cli
