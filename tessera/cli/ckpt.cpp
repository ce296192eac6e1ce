// `tessera ckpt`: works on checkpoints outside of a training run.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>

#include "tessera/base/error.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/cli/commands.h"

namespace tessera::cli {
namespace {

namespace fs = std::filesystem;

constexpr size_t kMostNames = 5;

/// Names the checkpoints beside the prefix, for the error that there is none of that name.
std::string what_is_there(const fs::path& prefix) {
  const auto folder = prefix.has_parent_path() ? prefix.parent_path() : fs::path(".");
  std::vector<std::string> names;
  std::error_code error;
  for (fs::directory_iterator entry(folder, error), end; !error && entry != end; entry.increment(error)) {
    const auto name = entry->path().filename().string();
    if (name.find("-step-") != std::string::npos || checkpoint::is_complete(entry->path())) names.push_back(name);
  }
  if (error) return fmt::format("can't read the folder {}: {}", folder.string(), error.message());
  if (names.empty()) return fmt::format("the folder {} holds no checkpoint", folder.string());
  std::ranges::sort(names);
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

void consolidate(std::string prefix, std::string save_path) {
  while (prefix.size() > 1 && prefix.ends_with('/')) prefix.pop_back();
  const auto folder = find(prefix);
  if (save_path.empty()) save_path = prefix + "-consolidated.safetensors";
  const auto done = checkpoint::consolidate(folder, save_path);
  fmt::print("{} -> {}: {} parameters in {} tensors, {} bytes\n", folder.string(), save_path, done.parameters, done.tensors, done.bytes);
}

}  // namespace

void add_ckpt_command(CLI::App& app) {
  auto* command = app.add_subcommand("ckpt", "Works on saved checkpoints");
  command->require_subcommand(1);
  auto* together = command->add_subcommand("consolidate", "Puts the ranks' parts of a model together into one safetensors file");
  const auto prefix = std::make_shared<std::string>(), save_path = std::make_shared<std::string>();
  together->add_option("--ckpt-prefix,--ckpt_prefix", *prefix, "A checkpoint's folder P, or the P of folders P-step-N: the newest is taken")
      ->required();
  together->add_option("--save-path,--save_path", *save_path, "The file to write; P-consolidated.safetensors unless given");
  together->callback([prefix, save_path] { consolidate(*prefix, *save_path); });
}

}  // namespace tessera::cli
