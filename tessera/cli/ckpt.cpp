// `tessera ckpt`: works on checkpoints outside of a training run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/cli/commands.h"

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

/// The folder itself if it is a checkpoint, or else the newest checkpoint with this prefix.
fs::path find(const fs::path& prefix) {
  if (checkpoint::is_complete(prefix)) return prefix;
  if (const auto newest = checkpoint::latest(prefix)) return *newest;
  throw ConfigError(fmt::format("--ckpt-prefix {}: no complete checkpoint of that name, and none called {}-step-N; {}", prefix.string(),
                                prefix.filename().string(), what_is_there(prefix)));
}

std::string without_slashes(std::string path) {
  while (path.size() > 1 && path.ends_with('/')) path.pop_back();
  return path;
}

int consolidate(const std::string& given, std::string save_path) {
  const auto prefix = without_slashes(given);
  const auto folder = find(prefix);
  if (save_path.empty()) save_path = prefix + "-consolidated.safetensors";
  const auto done = checkpoint::consolidate(folder, save_path);
  fmt::print("{} -> {}: {} parameters in {} tensors, {} bytes\n", folder.string(), save_path, done.parameters, done.tensors, done.bytes);
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

}  // namespace

void add_ckpt_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("ckpt", "Works on saved checkpoints")->group("Commands");
  command->require_subcommand(1);
  auto* together =
      command->add_subcommand("consolidate", "Puts the ranks' parts of a model together into one safetensors file")->group("Commands");
  const auto prefix = std::make_shared<std::string>(), save_path = std::make_shared<std::string>();
  together->add_option("--ckpt-prefix", *prefix, "A checkpoint's folder P, or the P of folders P-step-N: the newest is taken")
      ->type_name("P")
      ->required();
  together->add_option("--save-path", *save_path, "The file to write; P-consolidated.safetensors unless given")->type_name("FILE");
  together->callback([&chosen, prefix, save_path] { chosen = [=] { return consolidate(*prefix, *save_path); }; });
  auto* check = command->add_subcommand("verify", "Reads all files of a checkpoint and compares their checksums")->group("Commands");
  check->add_option("--ckpt-prefix", *prefix, "A checkpoint's folder P, the P of folders P-step-N, or one safetensors file")
      ->type_name("P")
      ->required();
  check->callback([&chosen, prefix] { chosen = [=] { return verify(*prefix); }; });
}

}  // namespace tessera::cli
