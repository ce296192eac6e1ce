// Arguments of operators that lowerings may leave unread.
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

/// `name` as schemas have it: "aten::embedding", also in place.
bool may_be_unread(std::string_view name, std::string_view argument);

}  // namespace tessera::xla
