// `tessera ckpt`: works on checkpoints outside of a training run.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <iostream>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/words.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"
#include "tessera/cli/packages.h"

namespace tessera::cli {
namespace {

int consolidate(const std::string& given, const std::string& suffix, std::string save_path) {
  const auto prefix = without_slashes(given);
  const auto place = resolve_rank_files(prefix, suffix);
  if (save_path.empty()) save_path = checkpoint::consolidated_name(prefix).string();
  const auto done = checkpoint::consolidate(place, save_path, megabyte_bar("consolidating"));
  fmt::print("{} -> {}: {}, {}; {}\n", place.string(), save_path, counted(done.tensors, "tensor"), counted(done.bytes, "byte"),
             counted(done.parameters, "parameter"));
  return 0;
}

int verify(const std::string& given, bool cheap) {
  const auto place = resolve_tensors(given);
  // Given a prefix, lists its checkpoints before verify() reads one, because a running job may save more meanwhile.
  std::vector<checkpoint::StepFolder> folders;
  if (without_slashes(given) != place.string()) folders = checkpoint::step_folders(without_slashes(given));
  const auto found = checkpoint::verify(place, {.cheap = cheap});
  for (const auto& fault : found.faults) fmt::print(stderr, "{}\n", printable(fault));
  if (!found.faults.empty()) throw IoError("{} is damaged in {}", place, counted(std::ssize(found.faults), "place"));
  std::string unchecked;
  if (cheap) {
    unchecked = "; checksums were not compared";
  } else if (found.without_checksum == found.tensors) {
    unchecked = "; there are no checksums to compare";
  } else if (found.without_checksum > 0) {
    unchecked = fmt::format("; {} of the tensors have no checksum", found.without_checksum);
  }
  if (found.without_manifest) unchecked += "; it has no manifest.json, so only its files say what belongs to it";
  fmt::print("{} {}: {}, {}, {}{}\n", place.string(), unchecked.empty() ? "is whole" : "has all its bytes", counted(found.files, "file"),
             counted(found.tensors, "tensor"), counted(found.bytes, "byte"), unchecked);
  if (folders.empty() || folders.back().folder == place) return 0;
  if (const auto why = checkpoint::why_incomplete(folders.back().folder))
    throw IoError("{} is newer, and can't be loaded: {}", folders.back().folder, *why);
  return 0;
}

int inspect(const std::string& given, bool as_json) {
  const auto found = checkpoint::inspect(resolve_tensors(given));
  std::cout << (as_json ? found + "\n" : checkpoint::to_table(found));
  return 0;
}

}  // namespace

void add_ckpt_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("ckpt", "Works on saved checkpoints");
  command->require_subcommand(1);
  command->footer(
      Help::footer_of({"tessera ckpt inspect run/mnist", "tessera ckpt verify run/mnist", "tessera ckpt merge run/mnist merged"}));
  auto* together = command->add_subcommand("consolidate", "Puts the ranks' parts of a model together into one file");
  const auto prefix = std::make_shared<std::string>(), save_path = std::make_shared<std::string>(),
             suffix = std::make_shared<std::string>();
  add_place(*together, *prefix,
            "A checkpoint's folder P, the P of folders P-step-N, of which the newest is taken, or the P of files P_rank-R-of-N.pth of "
            "torch_xla");
  together->add_option("--ckpt-suffix", *suffix, "The end of the names of torch_xla's files after P, such as *.pth")->type_name("S");
  together->add_option("--save-path", *save_path, "The file to write, P_consolidated.pth unless given; .safetensors writes safetensors")
      ->type_name("FILE");
  together->footer(
      Help::footer_of({"tessera ckpt consolidate run/mnist", "tessera ckpt consolidate --ckpt-prefix old/net --ckpt-suffix '*.pth'"}));
  together->callback([&chosen, prefix, suffix, save_path] {
    if (!save_path->empty()) {
      checkpoint::expect_known_ending(*save_path);
      expect_apart(*prefix, *save_path);
    }
    chosen = [=] { return consolidate(*prefix, *suffix, *save_path); };
  });
  auto* check = command->add_subcommand("verify", "Reads all files of a checkpoint and compares their checksums");
  add_place(*check, *prefix, "A checkpoint's folder P, the P of folders P-step-N, or a file");
  const auto cheap = std::make_shared<bool>(false);
  check->add_flag("--cheap", *cheap, "Look only at sizes and headers");
  check->footer(Help::footer_of({"tessera ckpt verify run/mnist", "tessera ckpt verify run/mnist --cheap"}));
  check->callback([&chosen, prefix, cheap] { chosen = [=] { return verify(*prefix, *cheap); }; });
  auto* look = command->add_subcommand("inspect", "Lists what a checkpoint of any format holds");
  const auto path = std::make_shared<std::string>();
  const auto as_json = std::make_shared<bool>(false);
  add_place(*look, *path, "A folder or a file, or the P of folders P-step-N");
  look->add_flag("--json", *as_json, "As JSON");
  look->footer(Help::footer_of({"tessera ckpt inspect run/mnist", "tessera ckpt inspect model.safetensors --json"}));
  look->callback([&chosen, path, as_json] { chosen = [=] { return inspect(*path, *as_json); }; });
  add_prune(*command, chosen);
  add_merge(*command, "merge", chosen);
  add_command_of("models", "merge-adapter", *command, chosen);
  add_convert(*command, chosen);
  add_reshard(*command, chosen);
  add_diff(*command, chosen);
  add_merge(app, "merge-weights", chosen);
}

}  // namespace tessera::cli
