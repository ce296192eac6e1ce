// `tessera params`: how many parameters a checkpoint has.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>

#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/help.h"

namespace tessera::cli {
namespace {

int print_parameters(const std::string& path) {
  const auto catalog = checkpoint::read_model(path);
  int64_t parameters = 0;
  for (const auto& [name, tensor] : catalog.tensors) parameters += c10::multiply_integers(tensor.shape);
  fmt::print("{} parameters in {} tensors\n", parameters, catalog.tensors.size());
  return 0;
}

}  // namespace

void add_params_command(CLI::App& app, std::function<int()>& chosen) {
  auto* command = app.add_subcommand("params", "Says how many parameters a checkpoint has, of any format");
  const auto path = std::make_shared<std::string>();
  command->add_option("PATH", *path, "The checkpoint")->required();
  command->footer(Help::footer_of({"tessera params bert-base-uncased"}));
  command->callback([&chosen, path] { chosen = [path] { return print_parameters(*path); }; });
}

}  // namespace tessera::cli
