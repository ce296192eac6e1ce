// A command that runs in a process of its own, because what it loads may end it.
#pragma once

#include <functional>
#include <map>
#include <string>

namespace tessera::cli {

/// Runs `body` in a child, which this program becomes with its own arguments, and returns its status. What others print on standard error
/// there is shown only if the child does not end by itself: then as an error.
int run_apart(std::map<std::string, std::string> environment, const std::function<int()>& body);

}  // namespace tessera::cli
