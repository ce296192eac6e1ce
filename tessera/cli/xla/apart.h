// Runs a command in a child process, because a plugin that it loads may end the process.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace tessera::cli {

/// Runs `body` in a child, which is this program with the same arguments, and returns its status. Shows what a plugin prints on standard
/// error only if the plugin ends the child: the error that is thrown then quotes its last message.
int run_apart(std::map<std::string, std::string> environment, const std::function<int()>& body);

}  // namespace tessera::cli
