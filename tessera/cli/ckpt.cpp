// `tessera ckpt`: works on checkpoints outside of a training run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <iostream>
#include <map>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/formats/torch_xla.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/prune.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/cli/commands.h"
#include "tessera/train/progress.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostNames = 5;

/// Names the checkpoints beside the prefix, for the error that there is none of that name.
std::string what_is_there(const fs::path& prefix) {
  const auto folder = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  const auto all = names_in(folder);
  if (!all) return fmt::format("there is no folder {}", folder.string());
  std::vector<std::string> names;
  std::ranges::copy_if(*all, std::back_inserter(names), [&](const std::string& name) {
    return name.find("-step-") != std::string::npos || checkpoint::is_complete(folder / name);
  });
  if (names.empty()) return fmt::format("the folder {} holds no checkpoint", folder.string());
  const auto more = names.size() > kMostNames ? fmt::format(" and {} more", names.size() - kMostNames) : "";
  names.resize(std::min(names.size(), kMostNames));
  return fmt::format("{} has {}{}", folder.string(), fmt::join(names, ", "), more);
}

/// The folder itself if it is a checkpoint, or else the newest checkpoint with this prefix, or else what other programs have called so.
fs::path find(const fs::path& prefix) {
  if (checkpoint::is_complete(prefix)) return prefix;
  if (const auto newest = checkpoint::latest(prefix)) return *newest;
  if (is_there(prefix) || !checkpoint::torch_xla_files(prefix).empty()) return prefix;
  throw ConfigError(fmt::format("--ckpt-prefix {}: no complete checkpoint of that name, and none called {}-step-N; {}", prefix.string(),
                                prefix.filename().string(), what_is_there(prefix)));
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

/// What a command calls after each tensor: it shows how many MB are done.
checkpoint::MergeProgress shown_by(std::optional<train::Progress>& bar, const char* title) {
  return [&bar, title](const std::string& /*name*/, int64_t bytes, int64_t all) {
    constexpr int64_t kMega = 1'000'000;
    if (!bar)
      bar.emplace(train::ProgressOptions{.title = title, .steps = all / kMega, .at_end = train::AtEnd::Vanishes},
                  train::Display::of(stderr));
    bar->update(bytes / kMega);
  };
}

/// As torch_xla finds them: all files that begin with the prefix and end in the suffix, unless there is something of just this prefix.
fs::path find_to_consolidate(const fs::path& prefix, const std::string& suffix) {
  if (!suffix.empty()) return prefix.string() + suffix;
  const auto all = prefix.string() + "*.pth";
  const bool is_known = is_there(prefix) || !checkpoint::step_folders(prefix).empty() || !checkpoint::torch_xla_files(prefix).empty();
  return !is_known && !checkpoint::torch_xla_files(all).empty() ? fs::path(all) : find(prefix);
}

int consolidate(const std::string& given, const std::string& suffix, std::string save_path) {
  const auto prefix = without_slashes(given);
  const auto place = find_to_consolidate(prefix, suffix);
  if (save_path.empty()) save_path = prefix + "_consolidated.pth";
  std::optional<train::Progress> bar;
  const auto done = checkpoint::consolidate(place, save_path, shown_by(bar, "consolidating, MB"));
  bar.reset();
  fmt::print("{} -> {}: {} parameters in {} tensors, {} bytes\n", place.string(), save_path, done.parameters, done.tensors, done.bytes);
  return 0;
}

int verify(const std::string& given) {
  const auto prefix = without_slashes(given);
  const auto place = is_there(prefix) ? fs::path(prefix) : find(prefix);
  const auto found = checkpoint::verify(place);
  for (const auto& fault : found.faults) fmt::print(stderr, "{}\n", fault);
  if (!found.faults.empty())
    throw IoError(fmt::format("{} is damaged in {} place{}", place.string(), found.faults.size(), found.faults.size() == 1 ? "" : "s"));
  fmt::print("{} is whole: {} files, {} tensors, {} bytes{}\n", place.string(), found.files, found.tensors, found.bytes,
             found.without_checksum == 0 ? "" : fmt::format("; {} tensors have no checksum", found.without_checksum));
  return 0;
}

int inspect(const std::string& given, bool as_json) {
  const auto path = without_slashes(given);
  const auto found = checkpoint::inspect(is_there(path) ? fs::path(path) : find(path));
  std::cout << (as_json ? found.dump(2) + "\n" : checkpoint::to_table(found));
  return 0;
}

/// "5GB", "200 MB", "1000000". Units are decimal, as in Accelerate.
int64_t bytes_of(const std::string& text) {
  static const std::map<std::string, double> kUnits = {{"", 1}, {"B", 1}, {"KB", 1e3}, {"MB", 1e6}, {"GB", 1e9}, {"TB", 1e12}};
  size_t end = 0;
  double number = 0;
  try {
    number = std::stod(text, &end);
  } catch (const std::exception&) {
    end = std::string::npos;
  }
  auto unit = end == std::string::npos ? "none" : text.substr(end);
  unit.erase(0, unit.find_first_not_of(' '));
  std::ranges::transform(unit, unit.begin(), [](unsigned char letter) { return std::toupper(letter); });
  const auto known = kUnits.find(unit);
  if (known == kUnits.end() || !(number * known->second >= 1))
    throw ConfigError(fmt::format("'{}' is no size; write 5GB, 200MB or a number of bytes", text));
  return static_cast<int64_t>(number * known->second);
}

at::ScalarType dtype_of(const std::string& name) {
  static const std::map<std::string, at::ScalarType> kDtypes = {{"fp32", at::kFloat},    {"float32", at::kFloat},
                                                                {"fp16", at::kHalf},     {"float16", at::kHalf},
                                                                {"bf16", at::kBFloat16}, {"bfloat16", at::kBFloat16}};
  const auto known = kDtypes.find(name);
  if (known == kDtypes.end()) throw ConfigError(fmt::format("'{}' is no dtype for weights; write fp32, fp16 or bf16", name));
  return known->second;
}

struct MergeCommand {
  std::string from, out, max_shard_size = "5GB", dtype;
  bool unsafe_serialization = false, remove_checkpoint_dir = false;

  int run() const {
    checkpoint::MergeOptions options{.max_shard_size = bytes_of(max_shard_size),
                                     .unsafe_serialization = unsafe_serialization,
                                     .remove_checkpoint_dir = remove_checkpoint_dir,
                                     .progress = {}};
    std::optional<train::Progress> bar;
    options.progress = shown_by(bar, "merging, MB");
    if (!dtype.empty()) options.dtype = dtype_of(dtype);
    const auto place = without_slashes(from);
    const auto folder = is_there(place) ? fs::path(place) : find(place);
    const auto merged = checkpoint::merge(folder, out, options);
    bar.reset();
    fmt::print("{} -> {}: {} tensors, {} bytes in {} file{}\n", folder.string(),
               merged.files.size() == 1 ? merged.files.front().string() : out, merged.tensors, merged.bytes, merged.files.size(),
               merged.files.size() == 1 ? "" : "s");
    return 0;
  }
};

int prune(const std::string& given, const checkpoint::Keep& keep) {
  const auto prefix = without_slashes(given);
  if (checkpoint::step_folders(prefix).empty()) {
    throw ConfigError(fmt::format("--ckpt-prefix {}: there is no checkpoint {}-step-N; {}", prefix, fs::path(prefix).filename().string(),
                                  what_is_there(prefix)));
  }
  const auto removed = checkpoint::prune(prefix, keep);
  for (const auto& folder : removed) fmt::print("removed {}\n", folder.string());
  const auto left = checkpoint::step_folders(prefix).size();
  fmt::print("{} removed, {} left\n", removed.size(), left);
  return 0;
}

void add_prune(CLI::App& command, std::function<int()>& chosen) {
  auto* prune_command = command.add_subcommand("prune", "Removes old checkpoints of a run")->group("Commands");
  const auto prefix = std::make_shared<std::string>();
  const auto keep = std::make_shared<checkpoint::Keep>();
  prune_command->add_option("--ckpt-prefix", *prefix, "The P of folders P-step-N")->type_name("P")->required();
  prune_command->add_option("--keep-last", keep->last, "How many of the newest stay")->type_name("N")->capture_default_str();
  prune_command->add_option("--keep-every", keep->every, "Those whose step is a multiple of N stay")->type_name("N");
  auto* best = prune_command->add_option("--keep-best", keep->best, "How many of the best stay")->type_name("N");
  prune_command->add_option("--metric", keep->metric, "The note that says how good one is; the lowest is best")
      ->type_name("NOTE")
      ->needs(best);
  prune_command->add_flag("--higher-is-better", keep->higher_is_better, "The highest is best")->needs(best);
  prune_command->callback([&chosen, prefix, keep] { chosen = [=] { return prune(*prefix, *keep); }; });
}

void add_merge(CLI::App& command, const std::string& name, std::function<int()>& chosen) {
  auto* merge = command.add_subcommand(name, "Makes files with the whole model of a checkpoint of any format")->group("Commands");
  const auto options = std::make_shared<MergeCommand>();
  merge->add_option("IN", options->from, "The checkpoint: a folder or a file, or the P of folders P-step-N")->required();
  merge->add_option("OUT", options->out, "The folder for model.safetensors")->required();
  merge->add_option("--max-shard-size", options->max_shard_size, "The largest file; if the model is larger, there are several and an index")
      ->type_name("SIZE")
      ->capture_default_str();
  merge->add_option("--dtype", options->dtype, "fp32, fp16 or bf16; that of the checkpoint unless given")->type_name("DTYPE");
  merge->add_flag("--unsafe-serialization", options->unsafe_serialization, "Write pytorch_model.bin, a file of torch.save");
  merge->add_flag("--remove-checkpoint-dir", options->remove_checkpoint_dir, "Remove IN when all is written");
  merge->callback([&chosen, options] { chosen = [=] { return options->run(); }; });
}

}  // namespace

void add_ckpt_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("ckpt", "Works on saved checkpoints")->group("Commands");
  command->require_subcommand(1);
  auto* together = command->add_subcommand("consolidate", "Puts the ranks' parts of a model together into one file")->group("Commands");
  const auto prefix = std::make_shared<std::string>(), save_path = std::make_shared<std::string>(),
             suffix = std::make_shared<std::string>();
  together
      ->add_option(
          "--ckpt-prefix", *prefix,
          "A checkpoint's folder P, the P of folders P-step-N, of which the newest is taken, or the P of files P_rank-R-of-N.pth of "
          "torch_xla")
      ->type_name("P")
      ->required();
  together->add_option("--ckpt-suffix", *suffix, "The files of torch_xla are those that match P and this, such as *.pth")->type_name("S");
  together->add_option("--save-path", *save_path, "The file to write, P_consolidated.pth unless given; .safetensors writes safetensors")
      ->type_name("FILE");
  together->callback([&chosen, prefix, suffix, save_path] { chosen = [=] { return consolidate(*prefix, *suffix, *save_path); }; });
  auto* check = command->add_subcommand("verify", "Reads all files of a checkpoint and compares their checksums")->group("Commands");
  check->add_option("--ckpt-prefix", *prefix, "A checkpoint's folder P, the P of folders P-step-N, or a file")->type_name("P")->required();
  check->callback([&chosen, prefix] { chosen = [=] { return verify(*prefix); }; });
  auto* look = command->add_subcommand("inspect", "Lists what a checkpoint of any format holds")->group("Commands");
  const auto path = std::make_shared<std::string>();
  const auto as_json = std::make_shared<bool>(false);
  look->add_option("PATH", *path, "A folder or a file, or the P of folders P-step-N")->required();
  look->add_flag("--json", *as_json, "As JSON");
  look->callback([&chosen, path, as_json] { chosen = [=] { return inspect(*path, *as_json); }; });
  add_prune(*command, chosen);
  add_merge(*command, "merge", chosen);
  add_merge(app, "merge-weights", chosen);
}

}  // namespace tessera::cli
