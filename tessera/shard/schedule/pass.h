// The kinds of pass through a model.
#pragma once

#include <string_view>

namespace tessera {

/// Forward passes are told apart by whether they build a graph.
enum class Pass { None, Training, Evaluation, Backward };

/// For messages.
inline std::string_view name_of(Pass pass) {
  switch (pass) {
    case Pass::None:
      break;
    case Pass::Training:
      return "forward";
    case Pass::Evaluation:
      return "a forward without gradients";
    case Pass::Backward:
      return "backward";
  }
  return "no pass";
}

}  // namespace tessera
