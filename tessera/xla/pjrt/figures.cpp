#include "tessera/xla/pjrt/figures.h"

#include "tessera/base/error.h"

namespace tessera::pjrt {

nlohmann::ordered_json figures_of(const CompiledProgram& program) {
  const auto [arguments, outputs, aliased, temporary, code, peak] = program.memory();
  nlohmann::ordered_json figures = {
      {"memory", {{"arguments", arguments}, {"outputs", outputs}, {"aliased", aliased}, {"temporary", temporary}, {"code", code}, {"peak", peak}}},
      {"cost", program.cost()}};
  try {
    figures["operations"] = program.operations();
    for (const auto& [name, all] : program.collectives()) figures["collectives"][name] = {{"count", all.count}, {"bytes", all.bytes}};
  } catch (const Error&) {  // some plugins keep no module of a program that was loaded from disk
  }
  return figures;
}

}  // namespace tessera::pjrt
