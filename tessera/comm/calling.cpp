#include "tessera/comm/calling.h"

namespace tessera {
namespace {

thread_local std::string_view called;

}  // namespace

Calling::Calling(std::string_view function) : is_outermost_(called.empty()) {
  if (is_outermost_) called = function;
}

Calling::~Calling() {
  if (is_outermost_) called = {};
}

std::string_view Calling::outermost() {
  return called;
}

}  // namespace tessera
