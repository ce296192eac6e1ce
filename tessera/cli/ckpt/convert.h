// `tessera ckpt convert`, and the parts of it that the package `models` registers.
#pragma once

#include <filesystem>
#include <string>

#include "tessera/checkpoint/convert.h"

namespace CLI {
class App;
}

namespace tessera::cli {

struct ConvertCommand {
  std::string in, out, to = "tessera";
  std::string base;          // the model that an adapter was trained on
  std::string code = "F16";  // the type of matrices in a GGUF file
  checkpoint::ConvertOptions options;
};

/// The conversions that the package `models` adds to `tessera ckpt convert`.
struct ModelConversions {
  bool (*is_adapter)(const std::filesystem::path& place);
  void (*convert_adapter)(const ConvertCommand& command, const std::filesystem::path& place, const std::string& target);
  void (*write_gguf)(const ConvertCommand& command, const std::filesystem::path& place, const std::string& target);
  /// Writes the files that a folder of the Hub has besides the weights, if `place` describes its model.
  void (*describe)(const ConvertCommand& command, const std::filesystem::path& place, const std::string& target);
};

/// Its constructor registers the conversions. The command-line module of the package `models` has a global object of this type, so they are
/// registered when the program loads that module.
struct AddedConversions {
  explicit AddedConversions(const ModelConversions& conversions);
};

/// Prints what was written: "run -> a.gguf: GGUF file with an adapter, 3,456 bytes".
void print_file(const ConvertCommand& command, const std::filesystem::path& place, const std::string& target, const std::string& what);

}  // namespace tessera::cli
