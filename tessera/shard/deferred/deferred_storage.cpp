#include "tessera/shard/deferred/deferred_storage.h"

#include <c10/core/Allocator.h>

#include <utility>

#include "tessera/base/compat.h"
#include "tessera/shard/deferred/tape.h"

namespace tessera {

DeferredStorage::DeferredStorage(const c10::StorageImpl& meta, std::shared_ptr<Tape> tape, c10::Device device)
    : StorageImpl(use_byte_size_t(), meta.nbytes(), at::DataPtr(nullptr, c10::kMeta), c10::GetAllocator(c10::kMeta), /*resizable=*/true),
      tape(std::move(tape)),
      device_of_values(device) {
  detail::deferring++;
  compat::guard_storage(*this,
                        "this tensor has no values yet, because it was made inside tessera::deferred_init, so there is no pointer to them: "
                        "tessera::materialize(module) and tessera::fully_shard give values to a module. Code in a constructor that uses "
                        "pointers can't be recorded");
}

DeferredStorage::~DeferredStorage() {
  end();
}

// Called when the last tensor of the storage is gone, if FormerMemory still has a weak reference.
void DeferredStorage::release_resources() {
  StorageImpl::release_resources();
  end();
}

void DeferredStorage::end() {
  if (tape) tape->close(number);
  tape.reset();
  values = {};
  if (std::exchange(counted_, false)) detail::deferring--;
}

}  // namespace tessera
