// The flags of torchrun and of Accelerate's launcher that `tessera launch` does not have. Scripts that are moved to Tessera may still use them.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Returns why a flag or a command of those launchers is refused, and what to write instead; empty if it is not one of theirs.
std::string reason_against(const CLI::App& command, const std::string& word);

/// Adds the flags of those launchers that have no effect here. Each one that is given adds a remark, unless it asks for what is so anyway.
void add_flags_without_effect(CLI::App& launch, const std::shared_ptr<std::vector<std::string>>& remarks);

}  // namespace tessera::cli
