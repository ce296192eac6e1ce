// A named number, such as the loss of a step.
#pragma once

#include <string>
#include <vector>

namespace tessera::train {

enum class Unit { None, Bytes, Part };  // Part: 0.41 is shown as 41 %

struct Value {
  std::string name;
  double value = 0;
  Unit unit = Unit::None;  // for display; files have the number alone
};

/// Values in the order in which they are shown, for example {{"loss", 0.41}, {"accuracy", 0.87}}.
using Values = std::vector<Value>;

}  // namespace tessera::train
