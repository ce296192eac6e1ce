#include "tessera/checkpoint/formats/torch/zip.h"

#include <libdeflate.h>
#include <zlib.h>

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"

namespace tessera::checkpoint {
namespace {

// An archive has entries, each after a header of its own, then a directory with a record for each entry, then an end that says where the
// directory is. There are two ends: that of ZIP64, and the original end, which has no room for 64-bit numbers.
constexpr uint32_t kEntry = 0x04034b50, kRecord = 0x02014b50, kEnd = 0x06054b50, kWideEnd = 0x06064b50, kWideLocator = 0x07064b50;
// The fields of each structure: a digit is the width of one field in bytes. The first field is the mark above.
constexpr std::string_view kEntryFields = "42222244422", kRecordFields = "42222224442222244", kEndFields = "42222442",
                           kWideEndFields = "4822448888", kWideLocatorFields = "4484";
constexpr uint64_t kCrcInEntry = 14;  // where the checksum is in the header of an entry
constexpr uint16_t kEncrypted = 1, kStored = 0, kUtf8Names = 1 << 11;
constexpr uint32_t kElsewhere = 0xffffffff;  // means that the number is in the ZIP64 field (kWide) of the record
constexpr uint16_t kWide = 1, kPadding = 'F' | 'B' << 8;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kLongestComment = 0xffff;
constexpr uint16_t kZipVersion = 45;        // the version of zip that has 64-bit numbers
constexpr uint16_t kFirstDay = 1 << 5 | 1;  // 1980-01-01, so that equal values make equal files
constexpr uint64_t kLargestDirectory = uint64_t{1} << 32;

constexpr uint64_t bytes_of_fields(std::string_view fields) {
  uint64_t bytes = 0;
  for (const char width : fields) bytes += static_cast<uint64_t>(width - '0');
  return bytes;
}

/// Writes one number for each field, little-endian as zip files and this machine are.
std::string packed(std::string_view fields, std::initializer_list<uint64_t> numbers) {
  std::string bytes;
  const auto* number = numbers.begin();
  for (const char width : fields) {
    bytes.append(reinterpret_cast<const char*>(number), static_cast<size_t>(width - '0'));
    number++;
  }
  return bytes;
}

std::string_view taken(std::string_view& bytes, uint64_t count) {
  if (count > bytes.size()) throw IoError("its directory is cut off");
  const auto result = bytes.substr(0, count);
  bytes.remove_prefix(count);
  return result;
}

/// Takes the numbers of the fields from the beginning of bytes.
std::vector<uint64_t> unpacked(std::string_view fields, std::string_view& bytes) {
  std::vector<uint64_t> numbers;
  numbers.reserve(fields.size());
  for (const char width : fields) {
    const auto text = taken(bytes, static_cast<uint64_t>(width - '0'));
    std::memcpy(&numbers.emplace_back(), text.data(), text.size());
  }
  return numbers;
}

class ZipReader {
 public:
  ZipReader(const InputFile& file, uint64_t begin, uint64_t bytes) : file_(file), begin_(begin), bytes_(bytes) {
    if (begin > file.size() || bytes > file.size() - begin) throw IoError("it extends past the end of the file");
  }

  ZipArchive read() {
    const auto [first, size, count] = directory();
    if (first > bytes_ || size > bytes_ - first || size > kLargestDirectory) throw IoError("its directory is not where it should be");
    const auto text = bytes_at(first, size);
    std::string_view rest = text;
    ZipArchive archive{.checksum = checksum_of(text)};
    for (uint64_t i = 0; i < count; i++) {
      const auto [name, entry] = record(rest);
      if (!archive.entries.emplace(name, entry).second) throw IoError("the entry '{}' occurs twice", name);
    }
    return archive;
  }

 private:
  struct Directory {
    uint64_t first, size, count;
  };

  std::string bytes_at(uint64_t begin, uint64_t count) const {
    if (begin > bytes_ || count > bytes_ - begin) throw IoError("it is cut off");
    std::string result(count, '\0');
    file_.read(result.data(), count, begin_ + begin);
    return result;
  }
  std::vector<uint64_t> fields_at(uint64_t begin, std::string_view fields) const {
    const auto text = bytes_at(begin, bytes_of_fields(fields));
    std::string_view rest = text;
    return unpacked(fields, rest);
  }

  Directory directory() const {
    constexpr auto kEndBytes = bytes_of_fields(kEndFields), kLocatorBytes = bytes_of_fields(kWideLocatorFields);
    std::string tail;
    auto place = std::string::npos;
    for (const auto most : {kEndBytes, kEndBytes + kLongestComment}) {  // first without a comment, since few archives have one
      const auto count = std::min(bytes_, most);
      tail = bytes_at(bytes_ - count, count);
      place = tail.rfind(packed("4", {kEnd}));
      if (place != std::string::npos) break;
    }
    if (place == std::string::npos || tail.size() - place < kEndBytes) throw IoError("its end is missing");
    const uint64_t end_place = bytes_ - tail.size() + place;
    std::string_view rest = std::string_view(tail).substr(place);
    const auto end = unpacked(kEndFields, rest);
    if (end[1] != 0 || end[2] != 0) throw IoError("it is one of several parts");
    const Directory narrow{.first = end[6], .size = end[5], .count = end[4]};
    if (end_place < kLocatorBytes) return narrow;
    const auto locator = fields_at(end_place - kLocatorBytes, kWideLocatorFields);
    if (locator[0] != kWideLocator) return narrow;
    const auto wide = fields_at(locator[2], kWideEndFields);
    if (wide[0] != kWideEnd) throw IoError("its directory is not where it should be");
    return {.first = wide[9], .size = wide[8], .count = wide[7]};
  }

  std::pair<std::string, ZipEntry> record(std::string_view& rest) const {
    const auto fields = unpacked(kRecordFields, rest);
    if (fields[0] != kRecord) throw IoError("its directory is damaged");
    ZipEntry entry{.bytes = fields[9], .packed = fields[4] != kStored, .crc32 = static_cast<uint32_t>(fields[7])};
    uint64_t stored = fields[8], place = fields[16];
    const std::string name(taken(rest, fields[10]));
    take_wide(taken(rest, fields[11]), {&entry.bytes, &stored, &place});
    taken(rest, fields[12]);  // a comment
    if ((fields[3] & kEncrypted) != 0) throw IoError("the entry '{}' is encrypted", name);
    if (!entry.packed && stored != entry.bytes) throw IoError("the entry '{}' has two sizes", name);
    entry.begin = content_of(name, place);
    if (entry.begin > bytes_ || stored > bytes_ - entry.begin) throw IoError("the entry '{}' is cut off", name);
    entry.begin += begin_;
    return {name, entry};
  }

  /// Reads the numbers that have no room in 32 bits from the extra field.
  static void take_wide(std::string_view extra, std::initializer_list<uint64_t*> numbers) {
    while (!extra.empty()) {
      const auto head = unpacked("22", extra);
      auto field = taken(extra, head[1]);
      if (head[0] != kWide) continue;
      for (auto* const number : numbers) {
        if (*number == kElsewhere) *number = unpacked("8", field)[0];
      }
      return;
    }
  }

  /// Returns where an entry's content begins, given the place of its header. Compares the name in the header, which no checksum covers.
  uint64_t content_of(const std::string& name, uint64_t place) const {
    const auto text = bytes_at(place, bytes_of_fields(kEntryFields) + name.size());
    std::string_view rest = text;
    const auto fields = unpacked(kEntryFields, rest);
    if (fields[0] != kEntry || rest != name) throw IoError("the entry '{}' is not where it should be", name);
    return place + bytes_of_fields(kEntryFields) + fields[9] + fields[10];
  }

  const InputFile& file_;
  const uint64_t begin_, bytes_;
};

}  // namespace

uint32_t crc32_of(std::span<const std::byte> bytes, uint32_t before) {
  return ::libdeflate_crc32(before, bytes.data(), bytes.size());
}

uint32_t joined_crc32(uint32_t first, uint32_t second, uint64_t second_bytes) {
  return static_cast<uint32_t>(::crc32_combine(first, second, static_cast<z_off_t>(second_bytes)));
}

ZipArchive read_zip(const InputFile& file, uint64_t begin, uint64_t bytes, const std::string& where) {
  try {
    return ZipReader(file, begin, bytes).read();
  } catch (const IoError& error) {
    throw IoError("{} is damaged or cut off: as a zip archive, {}", where, error.what());
  }
}

std::optional<std::string> fault_of_zip(const InputFile& file) {
  constexpr auto kEndBytes = bytes_of_fields(kEndFields);
  if (file.size() < kEndBytes) return std::nullopt;
  uint32_t begin = 0, end = 0;
  file.read(&begin, sizeof begin, 0);
  file.read(&end, sizeof end, file.size() - kEndBytes);
  if (begin != kEntry && end != kEnd) return std::nullopt;
  const auto where = file.path().string();
  try {
    for (const auto& [name, entry] : read_zip(file, 0, file.size(), where).entries) {
      if (!entry.packed) read_entry(file, entry, where);
    }
    return std::nullopt;
  } catch (const IoError& error) {
    return error.what();
  }
}

std::string read_entry(const InputFile& file, const ZipEntry& entry, const std::string& where) {
  std::string bytes(entry.bytes, '\0');
  file.read(bytes.data(), entry.bytes, entry.begin);
  if (entry.crc32 != 0 && crc32_of(std::as_bytes(std::span(bytes))) != entry.crc32) {
    throw IoError("{} is damaged: bytes {} to {} are not those that were written, because they have another checksum", where, entry.begin,
                  entry.begin + entry.bytes);
  }
  return bytes;
}

void ZipWriter::add(const std::string& name, std::span<const std::byte> bytes) {
  write_header({.name = name, .bytes = bytes.size(), .crc32 = bytes.empty() ? 0 : crc32_of(bytes)});
  write(bytes);
}

void ZipWriter::begin(std::string name, uint64_t bytes) {
  write_header({.name = std::move(name), .bytes = bytes});
}

void ZipWriter::append(std::span<const std::byte> piece) {
  auto& crc = entries_.back().crc32;
  if (!piece.empty()) crc = crc32_of(piece, crc);
  write(piece);
}

uint64_t ZipWriter::reserve(std::string name, uint64_t bytes) {
  write_header({.name = std::move(name), .bytes = bytes});
  const auto begin = end_;
  file_.reserve(bytes);
  end_ += bytes;
  return begin;
}

void ZipWriter::set_checksum(size_t entry, uint32_t crc32) {
  entries_[entry].crc32 = crc32;
  const auto crc = packed("4", {crc32});
  file_.overwrite(begin_ + entries_[entry].place + kCrcInEntry, std::as_bytes(std::span(crc)));
}

// All numbers are written with 64 bits, whatever their size, so that there is one code path, which every test takes.
void ZipWriter::write_header(Entry entry) {
  entry.place = end_ - begin_;
  auto extra = packed("2288", {kWide, 16, entry.bytes, entry.bytes});
  const auto unaligned = entry.place + bytes_of_fields(kEntryFields) + entry.name.size() + extra.size() + 4;
  const auto padding = (kAlignment - unaligned % kAlignment) % kAlignment;
  extra += packed("22", {kPadding, padding}) + std::string(padding, 'Z');
  const auto header = packed(kEntryFields, {kEntry, kZipVersion, kUtf8Names, kStored, 0, kFirstDay, entry.crc32, kElsewhere, kElsewhere,
                                            entry.name.size(), extra.size()});
  const auto all = header + entry.name + extra;
  write(std::as_bytes(std::span(all)));
  entries_.push_back(std::move(entry));
}

uint64_t ZipWriter::close() {
  std::string directory;
  for (const auto& [name, bytes, place, crc32] : entries_) {
    const auto wide = packed("22888", {kWide, 24, bytes, bytes, place});
    directory += packed(kRecordFields, {kRecord, kZipVersion, kZipVersion, kUtf8Names, kStored, 0, kFirstDay, crc32, kElsewhere, kElsewhere,
                                        name.size(), wide.size(), 0, 0, 0, 0, kElsewhere}) +
                 name + wide;
  }
  checksum_ = checksum_of(directory);
  const uint64_t count = entries_.size(), first = end_ - begin_, size = directory.size();
  directory +=
      packed(kWideEndFields, {kWideEnd, bytes_of_fields(kWideEndFields) - 12, kZipVersion, kZipVersion, 0, 0, count, count, size, first}) +
      packed(kWideLocatorFields, {kWideLocator, 0, first + size, 1}) +
      packed(kEndFields, {kEnd, 0, 0, 0xffff, 0xffff, kElsewhere, kElsewhere, 0});
  write(std::as_bytes(std::span(directory)));
  return end_ - begin_;
}

void ZipWriter::write(std::span<const std::byte> bytes) {
  file_.write(bytes);
  end_ += bytes.size();
}

}  // namespace tessera::checkpoint
