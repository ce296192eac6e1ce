// Memory whose values lie in a file: the system can have the pages back while nobody uses them.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <filesystem>
#include <string_view>

namespace tessera {

struct DiskMemoryOptions {
  /// Where the files lie. They have no name there, and end with the memory. Empty: TMPDIR, or /tmp.
  std::filesystem::path folder = {};
  double fraction = 1;  // of the bytes; the rest is ordinary memory
};

/// The folder itself, or the one for temporary files if it is left out.
std::filesystem::path folder_of(const DiskMemoryOptions& options);

/// Throws ConfigError if the folder is no place for such files, or the fraction makes no sense.
void expect_sensible(const DiskMemoryOptions& options);

/// All zeros at first. The room on the disk is taken at once, so that a full disk is an IoError here and not the end of the process later.
/// `what` will be kept there, for that error.
at::DataPtr allocate_on_disk(size_t bytes, const DiskMemoryOptions& options, std::string_view what);

// Safe for any memory; no effect unless it is disk-backed.

/// Gives the pages back. Their values stay in the file, and come back when somebody reads them.
void evict_pages(const void* begin, size_t bytes) noexcept;
/// Lets the system read the pages before somebody needs them.
void read_pages_ahead(const void* begin, size_t bytes) noexcept;

}  // namespace tessera
