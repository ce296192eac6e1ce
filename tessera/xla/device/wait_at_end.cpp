#include "tessera/xla/device/wait_at_end.h"

#include <unistd.h>

#include "tessera/base/no_copy.h"
#include "tessera/xla/device/values.h"

namespace tessera::xla {
namespace {

class WaitAtEnd : NoCopy {
 public:
  WaitAtEnd() = default;
  ~WaitAtEnd() {
    if (::getpid() == process_) runner().wait();  // a child of a fork has no device
  }

 private:
  const ::pid_t process_ = ::getpid();
};

}  // namespace

void wait_at_end_of_thread() { thread_local const WaitAtEnd at_end; }

}  // namespace tessera::xla
