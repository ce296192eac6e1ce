// Writes tensors of a run into files that have reserved bytes for them.
#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/reserved.h"

namespace tessera::checkpoint {

/// Fills reserved bytes of files: each process writes its boxes of the tensors. Only the first process has to know `reserved`. Returns the
/// checksum of each tensor, for closing the files. Collective.
std::vector<std::string> fill_reserved(const RunSource& source, const std::vector<SourceTensor>& tensors,
                                       const std::vector<ReservedBytes>& reserved, DigestKind kind);

/// Writes tensors into new files. The first process calls `make`, which returns a pointer to a writer of the files, all processes fill the
/// files, and then the first process closes them. Returns the pointer, which is null in the other processes. Collective.
template <class Make>
auto write_reserved(const RunSource& source, const std::vector<SourceTensor>& tensors, DigestKind kind, Make make) {
  decltype(make()) writer;
  std::vector<ReservedBytes> reserved;
  source.on_first([&] {
    writer = make();
    reserved = writer->reserve();
  });
  const auto checksums = fill_reserved(source, tensors, reserved, kind);
  source.end_on_first([&] { writer->close(checksums); });
  return writer;
}

}  // namespace tessera::checkpoint
