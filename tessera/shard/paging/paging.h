// The fallback that every operator passes whose operands include a parameter, a shard or a shard's gradient.
#pragma once

namespace tessera {

/// Installs the fallback; one per process. Throws UsageError if another library has installed its own on the same key.
void install_paging();

}  // namespace tessera
