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

/// Has the first process begin files by `make`, which returns a pointer to their writer, and close them when their rooms are filled.
/// Returns the pointer, which is null in the others. Collective.
template <class Make>
auto write_rooms(const RunSource& source, const std::vector<SourceTensor>& tensors, DigestKind kind, Make make) {
  decltype(make()) writer;
  std::vector<Room> rooms;
  source.on_first([&] {
    writer = make();
    rooms = writer->leave_rooms();
  });
  const auto checksums = fill_rooms(source, tensors, rooms, kind);
  source.end_on_first([&] { writer->close(checksums); });
  return writer;
}

}  // namespace tessera::checkpoint
