// Sends batches from rank 0 to all ranks.
#pragma once

#include <optional>
#include <vector>

#include "tessera/comm/communicator.h"
#include "tessera/data/samples.h"
#include "tessera/data/share.h"

namespace tessera::data {

/// Throws UsageError unless the batch has as many rows as these shares together.
void expect_rows_of(const std::vector<Share>& shares, const Samples& batch);

/// Returns each rank's part of the batch that rank 0 passes, on the device of the ranks; nothing on all ranks if rank 0 passes nothing.
/// Other ranks need not pass anything. Collective.
std::optional<Samples> send_samples(const Communicator& world, const std::optional<Samples>& batch, const std::vector<Share>& shares);

}  // namespace tessera::data
