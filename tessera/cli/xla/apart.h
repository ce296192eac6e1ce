// A command that runs in a process of its own, because what it loads may end it.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace tessera::cli {

/// Runs `body` in a child, which is this program with the same arguments, and returns its status. Messages of plugins on standard error are
/// shown only if one ends the child, as an error.
int run_apart(std::map<std::string, std::string> environment, const std::function<int()>& body);

}  // namespace tessera::cli
