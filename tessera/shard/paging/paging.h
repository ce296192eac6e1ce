// Paging: a dispatcher fallback for all operators with a paged operand (an unsharded parameter, a shard, a gradient or a local value). The
// fallback unshards the units whose parameters the operator reads.
#pragma once

namespace tessera {

/// Installs the fallback, once per process, and runs the self-test. Throws UsageError if another library has installed a fallback on the same
/// key, or if the loaded libtorch does not behave as Tessera needs it.
void install_paging();

}  // namespace tessera
