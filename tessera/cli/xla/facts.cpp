// Plugins of XLA, for `tessera env`.
#include "tessera/cli/facts.h"
#include "tessera/xla/pjrt/plugin.h"

namespace tessera::cli {
namespace {

Chapter facts_of_plugins() {
  Chapter chapter{"xla_plugins", {}};
  for (const auto& plugin : pjrt::installed_plugins()) chapter.facts.push_back(fact(plugin.name + " of " + plugin.wheel, plugin.file.string()));
  if (chapter.facts.empty()) chapter.facts.push_back(fact("cpu", "no: `pip install xla-cpu-pjrt` brings one"));
  return chapter;
}

const AddedXlaFacts xla_facts(facts_of_plugins);

}  // namespace
}  // namespace tessera::cli
