// Paging: a dispatcher fallback for all operators with a paged operand (an unsharded parameter, a shard, a gradient or a local value). The
// fallback unshards the units whose parameters the operator reads.
#pragma once

namespace tessera {

/// Installs the fallback, once per process. Throws UsageError if another library has installed a fallback on the same key.
void install_paging();

}  // namespace tessera
