// Writes tensors of a run into files that have room for them.
#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/room.h"

namespace tessera::checkpoint {

/// Each process writes its boxes of the tensors, whose rooms the first one knows. Returns there what closes the files: the checksum of each
/// room. Collective.
std::vector<std::string> fill_rooms(const RunSource& source, const std::vector<SourceTensor>& tensors, const std::vector<Room>& rooms,
                                    DigestKind kind);

}  // namespace tessera::checkpoint
