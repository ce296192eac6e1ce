// Arguments of operators that lowerings need not read.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace tessera::xla {

struct Unread {
  std::string name;  // of the operator, without overload; "*" stands for all
  std::string argument;
  const char* why;
};
const std::vector<Unread>& unread_arguments();

/// `name` is that of a schema, such as "aten::embedding", or of its in-place form.
bool may_be_unread(std::string_view name, std::string_view argument);

}  // namespace tessera::xla
