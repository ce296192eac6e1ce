// The writers of runs, one function for each format.
#pragma once

#include <filesystem>
#include <vector>

namespace tessera::checkpoint {

class RunSource;

// Each function writes the run to `out`, and returns the files or the folder that it has written. Collective.
std::vector<std::filesystem::path> write_ranks(const RunSource& source, const std::filesystem::path& out);
std::vector<std::filesystem::path> write_dcp(const RunSource& source, const std::filesystem::path& out);
std::vector<std::filesystem::path> write_torch(const RunSource& source, const std::filesystem::path& out);
std::vector<std::filesystem::path> write_safetensors(const RunSource& source, const std::filesystem::path& out);
std::vector<std::filesystem::path> write_hub(const RunSource& source, const std::filesystem::path& out);
std::vector<std::filesystem::path> write_accelerate(const RunSource& source, const std::filesystem::path& out);

}  // namespace tessera::checkpoint
