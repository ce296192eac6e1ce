// A number under its name: what a step of training has to tell.
#pragma once

#include <string>
#include <vector>

namespace tessera::train {

struct Value {
  std::string name;
  double value = 0;
};

/// In the order in which they are shown: {{"loss", 0.41}, {"accuracy", 0.87}}.
using Values = std::vector<Value>;

}  // namespace tessera::train
