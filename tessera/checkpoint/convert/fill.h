// Writes tensors of a run into files that have reserved bytes for them.
#pragma once

#include <string>
#include <vector>

#include "tessera/checkpoint/convert/run_source.h"
#include "tessera/checkpoint/formats/reserved.h"

namespace tessera::checkpoint {

/// Fills files whose bytes are reserved: each process writes its boxes of the tensors. Only the first process has to know `reserved`.
/// Returns the checksum of each tensor, with which the files are closed. Collective.
std::vector<std::string> fill_reserved(const RunSource& source, const std::vector<SourceTensor>& tensors,
                                       const std::vector<ReservedBytes>& reserved, DigestKind kind);

/// Has the first process begin files by `make`, which returns a pointer to their writer, and close them when they are filled. Returns the
/// pointer, which is null in the other processes. Collective.
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
