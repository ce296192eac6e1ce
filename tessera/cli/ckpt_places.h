// What the commands of `tessera ckpt` share: how people name checkpoints, sizes and dtypes, and the bar.
#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace tessera::cli {

std::string without_slashes(std::string path);
/// The folder itself if it is a checkpoint of Tessera, or else the newest checkpoint with this prefix. Throws ConfigError if there is none.
std::filesystem::path find_checkpoint(const std::filesystem::path& prefix);
/// What is there, of any format, or else the newest checkpoint with this prefix.
std::filesystem::path place_of(const std::string& given);
/// Names the checkpoints beside the prefix, for the error that there is none of that name.
std::string what_is_there(const std::filesystem::path& prefix);

/// "5GB", "200 MB", "1000000". Units are decimal, as in Accelerate.
int64_t bytes_of(const std::string& text);
at::ScalarType dtype_of(const std::string& name);

/// A progress bar on standard error, in MB, that vanishes at the end.
std::function<void(const std::string& name, int64_t bytes, int64_t all)> megabyte_bar(const std::string& title);

// Each adds itself to the command line; once that is read, `chosen` is what it asks for.
void add_prune(CLI::App& command, std::function<int()>& chosen);
void add_merge(CLI::App& command, const std::string& name, std::function<int()>& chosen);
void add_convert(CLI::App& command, std::function<int()>& chosen);
void add_reshard(CLI::App& command, std::function<int()>& chosen);
void add_diff(CLI::App& command, std::function<int()>& chosen);

}  // namespace tessera::cli
