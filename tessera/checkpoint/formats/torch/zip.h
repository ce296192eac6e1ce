// Zip archives of uncompressed entries, as torch.save writes them: alone in a file, or one of several in a row.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "tessera/base/atomic_write.h"
#include "tessera/base/input_file.h"

namespace tessera::checkpoint {

/// The CRC-32 of zip archives. `before` is the CRC-32 of the bytes that come before `bytes`.
uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t before = 0);
/// The CRC-32 of two runs of bytes, one after the other, given the CRC-32 of each and the length of the second.
uint32_t joined_crc32(uint32_t first, uint32_t second, uint64_t second_bytes);

struct ZipEntry {
  uint64_t begin = 0;   // in the file
  uint64_t bytes = 0;   // when unpacked
  bool packed = false;  // compressed
  uint32_t crc32 = 0;   // 0 if the writing program left it out
};

struct ZipArchive {
  std::map<std::string, ZipEntry> entries = {};  // by name
  /// XXH3 of the directory, which has the names, sizes, places and CRC-32 of all entries: archives with the same checksum have the same
  /// content.
  std::string checksum = {};
};

/// Reads the directory of an archive. Throws IoError, which begins with `where`, if the file has no archive at byte `begin`.
ZipArchive read_zip(const InputFile& file, uint64_t begin, uint64_t bytes, const std::string& where);

/// Reads all of an archive, and describes its damage. Returns nothing for a sound archive, and for a file that is not an archive at all.
std::optional<std::string> fault_of_zip(const InputFile& file);

/// Reads the bytes of an entry. Throws IoError if their checksum is not the entry's.
std::string read_entry(const InputFile& file, const ZipEntry& entry, const std::string& where);

/// Appends an archive to a file. Throws IoError.
class ZipWriter {
 public:
  /// Begins the archive at byte `begin`, which is the end of the file so far.
  explicit ZipWriter(NewFile& file, uint64_t begin = 0) : file_(file), begin_(begin), end_(begin) {}

  void add(const std::string& name, std::span<const std::byte> bytes);
  void add(const std::string& name, std::string_view text) { add(name, std::as_bytes(std::span(text))); }
  /// begin(), append() and end() add an entry whose bytes come in pieces; `bytes` is their number.
  void begin(std::string name, uint64_t bytes);
  void append(std::span<const std::byte> piece);
  void end() { set_checksum(entries_.size() - 1, entries_.back().crc32); }
  /// Adds an entry whose bytes other processes write (see NewFile::reserve). Returns where in the file the bytes begin.
  uint64_t reserve(std::string name, uint64_t bytes);
  /// Sets the checksum of an entry whose bytes other processes have written.
  void set_checksum(size_t entry, uint32_t crc32);
  size_t entries() const { return entries_.size(); }
  /// ZipArchive::checksum of the closed archive.
  const std::string& checksum() const { return checksum_; }
  /// Writes the directory. Returns the length of the archive.
  uint64_t close();

 private:
  struct Entry {
    std::string name = {};
    uint64_t bytes = 0, place = 0;  // in the archive
    uint32_t crc32 = 0;
  };
  void write_header(Entry entry);
  void write(std::span<const std::byte> bytes);

  NewFile& file_;
  const uint64_t begin_;
  uint64_t end_;
  std::vector<Entry> entries_;
  std::string checksum_;
};

}  // namespace tessera::checkpoint
