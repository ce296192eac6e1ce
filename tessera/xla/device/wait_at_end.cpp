#include "tessera/xla/device/wait_at_end.h"

#include <unistd.h>

#include <utility>

#include "tessera/base/no_copy.h"

namespace tessera::xla {
namespace {

class WaitAtEnd : NoCopy {
 public:
  explicit WaitAtEnd(std::function<void()> wait) : wait_(std::move(wait)) {}
  ~WaitAtEnd() {
    if (::getpid() == process_) wait_();
  }

 private:
  const std::function<void()> wait_;
  const ::pid_t process_ = ::getpid();
};

}  // namespace

void wait_at_end_of_thread(std::function<void()> wait) { thread_local const WaitAtEnd at_end(std::move(wait)); }

}  // namespace tessera::xla
