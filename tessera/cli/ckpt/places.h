// Functions that the commands of `tessera ckpt` share: for names of checkpoints, sizes and dtypes, and for a progress bar.
#pragma once

#include <c10/core/ScalarType.h>
#include <CLI/CLI.hpp>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

#include "tessera/base/error.h"

namespace tessera::cli {

std::string without_slashes(std::string path);
/// Returns `prefix` itself if that is the folder of a checkpoint of Tessera, or else the newest checkpoint with this prefix. Throws
/// ConfigError if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& prefix);
/// Returns `given` itself if a file or folder of any format is there, or else the newest checkpoint with this prefix.
std::filesystem::path resolve_checkpoint(const std::string& given);
/// Returns the pattern of the rank files, which torch_xla forms of a prefix and a suffix; the suffix may have a *. Without a suffix,
/// returns what resolve_checkpoint() finds by the prefix or, if that is nothing and such files are there, PREFIX*.pth.
std::filesystem::path resolve_rank_files(const std::filesystem::path& prefix, const std::string& suffix);
/// Returns what resolve_checkpoint() returns, but for an adapter's folder of peft the file with the adapter's tensors.
std::filesystem::path resolve_tensors(const std::string& given);
/// Names the checkpoints in the prefix's folder, the most similar names first, for the error that says that none has this prefix.
std::string what_is_there(const std::filesystem::path& prefix);

/// Throws UsageError if writing `out` would replace, or hide, `in`.
void expect_apart(const std::string& in, const std::string& out);

/// Reads a number of bytes such as "5GB", "200 MB" or "1000000". Units are decimal, as in Accelerate.
int64_t bytes_of(const std::string& text);
at::ScalarType dtype_of(const std::string& name);

/// Adds an argument or flag for the checkpoint on which the command works. It may be given as the only argument, or by --ckpt-prefix as in
/// torch_xla's scripts.
void add_place(CLI::App& command, std::string& place, const std::string& description);

/// Adds a flag whose value `read` converts. A value that `read` refuses is wrong usage.
template <class Value, class Read>
CLI::Option* add_value(CLI::App& command, const std::string& flag, Value& value, const Read& read, const std::string& description) {
  const auto take = [flag, &value, read](const std::string& text) {
    try {
      value = read(text);
    } catch (const ConfigError& error) {
      throw ConfigError(flag + ": " + error.what());
    }
  };
  return command.add_option_function<std::string>(flag, take, description);
}

/// Makes a progress bar on standard error, in MB, that vanishes when all is done.
std::function<void(const std::string& name, int64_t bytes, int64_t all)> megabyte_bar(const std::string& title);

// Each function adds a command to the command line. After parsing, `chosen` runs the command that was given.
void add_prune(CLI::App& command, std::function<int()>& chosen);
void add_merge(CLI::App& command, const std::string& name, std::function<int()>& chosen);
void add_convert(CLI::App& command, std::function<int()>& chosen);
void add_reshard(CLI::App& command, std::function<int()>& chosen);
void add_diff(CLI::App& command, std::function<int()>& chosen);

}  // namespace tessera::cli
