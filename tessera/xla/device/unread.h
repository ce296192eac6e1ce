// Arguments of operators that lowerings need not read.
#pragma once

#include <span>
#include <string_view>

namespace tessera::xla {

struct Unread {
  const char* name;  // of the operator, without overload; "" stands for all
  const char* argument;
  const char* why;
};
std::span<const Unread> unread_arguments();

/// `name` is that of a schema, such as "aten::embedding", or of its in-place form.
bool may_be_unread(std::string_view name, std::string_view argument);

}  // namespace tessera::xla
