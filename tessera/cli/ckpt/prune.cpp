// `tessera ckpt prune`.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <limits>
#include <memory>

#include "tessera/base/error.h"
#include "tessera/checkpoint/prune.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/cli/ckpt/places.h"
#include "tessera/cli/help.h"
#include "tessera/cli/known_words.h"

namespace tessera::cli {
namespace {

int prune(const std::string& given, const checkpoint::Keep& keep) {
  const auto prefix = without_slashes(given);
  if (checkpoint::step_folders(prefix).empty()) {
    throw ConfigError("--ckpt-prefix {}: there is no checkpoint {}-step-N; {}", prefix, std::filesystem::path(prefix).filename().string(),
                      what_is_there(prefix));
  }
  const auto removed = checkpoint::prune(prefix, keep);
  for (const auto& folder : removed) fmt::print("removed {}\n", folder.string());
  const auto left = checkpoint::step_folders(prefix).size();
  fmt::print("{} removed, {} left\n", removed.size(), left);
  return 0;
}

}  // namespace

void add_prune(CLI::App& command, std::function<int()>& chosen) {
  auto* prune_command = command.add_subcommand("prune", "Removes old checkpoints of a run");
  const auto prefix = std::make_shared<std::string>();
  const auto keep = std::make_shared<checkpoint::Keep>();
  add_place(*prune_command, *prefix, "The P of folders P-step-N");
  auto* last = prune_command->add_option("--keep-last", keep->last, "How many of the newest to keep")->type_name("N")->capture_default_str();
  auto* every = prune_command->add_option("--keep-every", keep->every, "Keep those whose step is a multiple of N")->type_name("N");
  auto* best = prune_command->add_option("--keep-best", keep->best, "How many of the best to keep")->type_name("N");
  for (auto* count : {last, best}) count->check(from_to(1, std::numeric_limits<int>::max()));
  every->check(from_to(int64_t{1}, std::numeric_limits<int64_t>::max()));
  auto* metric = prune_command->add_option("--metric", keep->metric, "The note by which checkpoints are compared; the lowest is best")
                     ->type_name("NOTE")
                     ->needs(best);
  best->needs(metric);
  prune_command->add_flag("--higher-is-better", keep->higher_is_better, "The highest is best")->needs(best);
  prune_command->footer(Help::footer_of({"tessera ckpt prune --ckpt-prefix run/mnist --keep-last 3",
                                         "tessera ckpt prune --ckpt-prefix run/mnist --keep-best 2 --metric loss"}));
  prune_command->callback([&chosen, prefix, keep, last, every, best] {
    if (last->empty() && every->empty() && best->empty()) throw CLI::RequiredError("one of --keep-last, --keep-every and --keep-best");
    chosen = [=] { return prune(*prefix, *keep); };
  });
}

}  // namespace tessera::cli
