// Asks the questions of `tessera config`: menus with arrow keys on a terminal, lines elsewhere.
#pragma once

#include <string>

#include "tessera/cli/config/questions.h"

namespace tessera::cli {

/// Asks on standard output and reads standard input. Throws ConfigError, which names the question, when the input ends.
std::string ask_user(const Question& question, const std::string& complaint);

}  // namespace tessera::cli
