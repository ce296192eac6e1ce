// The models that `tessera plan` makes by itself from a description, and their training on made-up tokens.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>

namespace tessera::cli {

struct PlannedModel {
  std::string recipe;       // the program that trains such models
  std::string layer_class;  // whose modules become units
  int64_t longest = 0;      // tokens in the longest row
  std::filesystem::path place = {};  // the GGUF file, or the folder, that the recipe reads
  bool has_weights = true;
  /// Trains a few steps in this process, which is a dry run, as the recipe does: settings come from the environment.
  std::function<void(int64_t rows, int64_t length)> train;
};

/// Whether the path is meant as the description of a model: a folder, or the name of a file that describes one.
bool names_a_model(const std::filesystem::path& path);
/// Reads a folder with config.json, such a file itself, a safetensors file beside one, or a GGUF file; never weights. Throws ConfigError for a
/// model that no recipe trains, and IoError for a damaged file.
PlannedModel planned_model(const std::filesystem::path& path);

}  // namespace tessera::cli
