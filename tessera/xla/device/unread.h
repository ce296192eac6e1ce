// Arguments of operators that lowerings need not read.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::xla {

struct Unread {
  std::string name;  // the operator's name without the overload, or "*" for all operators
  std::string argument;
  const char* why;
};
const std::vector<Unread>& unread_arguments();

/// Whether a lowering need not read the argument. `name` is the name of a schema, such as "aten::embedding", or of its in-place form.
bool may_be_unread(std::string_view name, std::string_view argument);

}  // namespace tessera::xla
