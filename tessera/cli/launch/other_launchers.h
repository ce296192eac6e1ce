// The flags of torchrun and of Accelerate's programs that launch does not have, and scripts that are moved to Tessera may still use.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Why a flag or a command of theirs is refused, with what to write instead; empty if it is none of theirs.
std::string reason_against(const CLI::App& command, const std::string& word);

/// Adds the flags of theirs that change nothing here. Each one that is given adds a remark.
void add_flags_without_effect(CLI::App& launch, const std::shared_ptr<std::vector<std::string>>& remarks);

}  // namespace tessera::cli
