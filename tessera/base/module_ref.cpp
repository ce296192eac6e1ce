#include "tessera/base/module_ref.h"

#include "tessera/base/error.h"

namespace tessera::detail {

void refuse_no_module() {
  throw UsageError("a function was given an empty shared_ptr, or an empty module holder, instead of a module; make the module first");
}

}  // namespace tessera::detail
