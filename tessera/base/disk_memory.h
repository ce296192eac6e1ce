// Memory that is mapped from a file, so that the system can take its pages back while nobody uses them.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace tessera {

struct DiskMemoryOptions {
  /// The folder of the files, which have no names and are deleted with the memory. Empty: TMPDIR, or /tmp.
  std::filesystem::path folder = {};
  double fraction = 1;  // the fraction of the bytes that is on disk; the rest is ordinary memory
};

/// Returns options.folder, or the folder for temporary files if it is empty.
std::filesystem::path folder_of(const DiskMemoryOptions& options);

/// Throws ConfigError if the folder can't be used or lies in memory, or if the fraction is not between 0 and 1.
void expect_sensible(const DiskMemoryOptions& options);

/// Returns zeroed memory. Takes the space on the disk at once, so that a full disk is an IoError here and does not end the process later.
/// `what` names the data in that error.
at::DataPtr allocate_on_disk(size_t bytes, const DiskMemoryOptions& options, std::string_view what);

// The functions below take any memory, and do nothing with memory that is not from allocate_on_disk().

/// Gives the pages back to the system. Their values stay in the file, and are read again when somebody uses them.
void evict_pages(const void* begin, size_t bytes) noexcept;
/// Lets the system read the pages before somebody needs them.
void read_pages_ahead(const void* begin, size_t bytes) noexcept;

}  // namespace tessera
