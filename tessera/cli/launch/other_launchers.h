// The flags of torchrun and of Accelerate's launcher that `tessera launch` does not have. Scripts that are moved to Tessera may still use them.
#pragma once

#include <memory>
#include <string>
#include <vector>

namespace CLI {
class App;
}

namespace tessera::cli {

/// Returns why launch refuses a flag or command of torchrun or of Accelerate's launcher, and what to write instead; empty if the word is
/// neither.
std::string reason_against(const CLI::App& command, const std::string& word);

/// Adds the flags of these launchers that have no effect here. Each flag that is given adds a remark, unless it asks for what launch does
/// in any case.
void add_flags_without_effect(CLI::App& launch, const std::shared_ptr<std::vector<std::string>>& remarks);

}  // namespace tessera::cli
