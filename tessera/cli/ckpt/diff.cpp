// `tessera ckpt diff`.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <iostream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/cli/ckpt/places.h"

namespace tessera::cli {
namespace {

constexpr int kDiffers = 1, kTrouble = 2;  // the exit statuses of diff(1)

struct DiffCommand {
  std::string one, other;
  int64_t memory = checkpoint::DiffOptions{}.memory;
  bool as_json = false;

  int run() const try {
    checkpoint::DiffOptions options{.memory = memory, .progress = megabyte_bar("comparing")};
    const auto found = checkpoint::diff(resolve_tensors(one), resolve_tensors(other), options);
    options.progress = {};
    std::cout << (as_json ? checkpoint::to_json(found) + "\n" : checkpoint::to_table(found));
    return found.is_none() ? 0 : kDiffers;
  } catch (const Error& error) {
    fmt::print(stderr, "tessera: {}\n", printable(error.what(), "\n"));
    return kTrouble;
  }
};

}  // namespace

void add_diff(CLI::App& command, std::function<int()>& chosen) {
  auto* diff = command.add_subcommand("diff", "Compares the tensors of two checkpoints of any formats");
  const auto options = std::make_shared<DiffCommand>();
  diff->add_option("A", options->one, "A folder or a file, or the P of folders P-step-N")->required();
  diff->add_option("B", options->other, "The other one")->required();
  add_value(*diff, "--memory", options->memory, bytes_of, "How many bytes of tensors are in memory at once")
      ->type_name("SIZE")
      ->default_str("1GB");
  diff->add_flag("--json", options->as_json, "As JSON");
  diff->footer(
      "Examples:\n"
      "  tessera ckpt diff run/first-step-000100 run/second-step-000100\n"
      "  tessera ckpt diff run/mnist model.safetensors --json\n\n"
      "Exit status: 0 if they are equal, 1 if they differ, 2 if they can't be compared.");
  diff->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

}  // namespace tessera::cli
