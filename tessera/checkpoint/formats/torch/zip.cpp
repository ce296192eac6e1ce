#include "tessera/checkpoint/formats/torch/zip.h"

#include <libdeflate.h>
#include <zlib.h>
#include <algorithm>
#include <cstring>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"

namespace tessera::checkpoint {
namespace {

// An archive has entries, each after a header of its own, then a directory with a record for each entry, then an end with the place of the
// directory. The end comes twice: the original one has no room for numbers of 64 bits.
constexpr uint32_t kEntry = 0x04034b50, kRecord = 0x02014b50, kEnd = 0x06054b50, kWideEnd = 0x06064b50, kWideLocator = 0x07064b50;
constexpr uint64_t kEntryBytes = 30, kRecordBytes = 46, kEndBytes = 22, kWideEndBytes = 56, kWideLocatorBytes = 20;
constexpr uint64_t kCrcInEntry = 14;  // where the checksum is in the header of an entry
constexpr uint16_t kEncrypted = 1, kStored = 0, kUtf8Names = 1 << 11;
constexpr uint32_t kElsewhere = 0xffffffff;  // the number is in the wide field of the record
constexpr uint16_t kWide = 1, kPadding = 'F' | 'B' << 8;
constexpr uint64_t kAlignment = 64;
constexpr uint64_t kLongestComment = 0xffff;
constexpr uint16_t kZipVersion = 45;        // of a reader that knows numbers of 64 bits
constexpr uint16_t kFirstDay = 1 << 5 | 1;  // 1980-01-01, so that equal values make equal files
constexpr uint64_t kLargestDirectory = uint64_t{1} << 32;

/// Takes little-endian numbers from bytes.
class LittleEndian {
 public:
  explicit LittleEndian(std::string_view bytes) : bytes_(bytes) {}

  uint16_t two() { return static_cast<uint16_t>(number(2)); }
  uint32_t four() { return static_cast<uint32_t>(number(4)); }
  uint64_t eight() { return number(8); }
  std::string_view text(size_t count) {
    if (count > bytes_.size()) throw IoError("its directory is cut off");
    const auto result = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return result;
  }
  bool empty() const { return bytes_.empty(); }

 private:
  uint64_t number(size_t bytes) {
    uint64_t result = 0;
    std::memcpy(&result, text(bytes).data(), bytes);
    return result;
  }
  std::string_view bytes_;
};

class ZipReader {
 public:
  ZipReader(const InputFile& file, uint64_t begin, uint64_t bytes) : file_(file), begin_(begin), bytes_(bytes) {
    if (begin > file.size() || bytes > file.size() - begin) throw IoError("it lies behind the end of the file");
  }

  ZipArchive read() {
    const auto [first, size, count] = directory();
    if (first > bytes_ || size > bytes_ - first || size > kLargestDirectory) throw IoError("its directory is not where it should be");
    const auto text = bytes_at(first, size);
    LittleEndian fields(text);
    ZipArchive archive{.checksum = checksum_of(text)};
    for (uint64_t i = 0; i < count; i++) {
      const auto [name, entry] = record(fields);
      if (!archive.entries.emplace(name, entry).second) throw IoError("the entry '{}' comes twice", name);
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

  Directory directory() const {
    const std::string mark(reinterpret_cast<const char*>(&kEnd), sizeof kEnd);
    std::string tail;
    auto place = std::string::npos;
    for (const auto most : {kEndBytes, kEndBytes + kLongestComment}) {  // few archives have a comment
      const auto count = std::min(bytes_, most);
      tail = bytes_at(bytes_ - count, count);
      place = tail.rfind(mark);
      if (place != std::string::npos) break;
    }
    if (place == std::string::npos || tail.size() - place < kEndBytes) throw IoError("the end of it is missing");
    LittleEndian end(std::string_view(tail).substr(place));
    end.four();
    if (end.four() != 0) throw IoError("it is one of several parts");
    end.two();
    const auto count = end.two();
    const uint64_t size = end.four(), first = end.four();
    const uint64_t end_place = bytes_ - tail.size() + place;
    if (end_place < kWideLocatorBytes) return {first, size, count};
    const auto locator_text = bytes_at(end_place - kWideLocatorBytes, kWideLocatorBytes);
    LittleEndian locator(locator_text);
    if (locator.four() != kWideLocator) return {first, size, count};
    locator.four();
    const auto wide_text = bytes_at(locator.eight(), kWideEndBytes);
    LittleEndian wide(wide_text);
    if (wide.four() != kWideEnd) throw IoError("its directory is not where it should be");
    wide.text(28);
    const auto wide_count = wide.eight(), wide_size = wide.eight();
    return {wide.eight(), wide_size, wide_count};
  }

  std::pair<std::string, ZipEntry> record(LittleEndian& fields) const {
    if (fields.four() != kRecord) throw IoError("its directory is damaged");
    fields.four();
    const auto flags = fields.two(), packing = fields.two();
    fields.four();
    ZipEntry entry;
    entry.crc32 = fields.four();
    uint64_t packed = fields.four();
    entry.bytes = fields.four();
    const auto name_bytes = fields.two(), extra_bytes = fields.two(), comment_bytes = fields.two();
    fields.eight();
    uint64_t place = fields.four();
    const std::string name(fields.text(name_bytes));
    LittleEndian extra(fields.text(extra_bytes));
    fields.text(comment_bytes);
    take_wide(extra, {&entry.bytes, &packed, &place});
    if ((flags & kEncrypted) != 0) throw IoError("the entry '{}' is encrypted", name);
    entry.packed = packing != kStored;
    if (!entry.packed && packed != entry.bytes) throw IoError("the entry '{}' has two sizes", name);
    entry.begin = content_of(name, place);
    if (entry.begin > bytes_ || packed > bytes_ - entry.begin) throw IoError("the entry '{}' is cut off", name);
    entry.begin += begin_;
    return {name, entry};
  }

  /// Reads the numbers that have no room in 32 bits from the extra field.
  static void take_wide(LittleEndian extra, std::initializer_list<uint64_t*> numbers) {
    while (!extra.empty()) {
      const auto id = extra.two();
      LittleEndian field(extra.text(extra.two()));
      if (id != kWide) continue;
      for (auto* const number : numbers) {
        if (*number == kElsewhere) *number = field.eight();
      }
      return;
    }
  }

  /// Returns where an entry's content begins, given the place of its header. Compares the name in the header, which no checksum covers.
  uint64_t content_of(const std::string& name, uint64_t place) const {
    const auto text = bytes_at(place, kEntryBytes + name.size());
    LittleEndian header(text);
    const bool is_entry = header.four() == kEntry && std::string_view(text).substr(kEntryBytes) == name;
    if (!is_entry) throw IoError("the entry '{}' is not where it should be", name);
    header.text(22);
    const uint64_t name_bytes = header.two(), extra_bytes = header.two();
    return place + kEntryBytes + name_bytes + extra_bytes;
  }

  const InputFile& file_;
  const uint64_t begin_, bytes_;
};

std::string number(uint64_t value, int bytes) {
  std::string result;
  for (int i = 0; i < bytes; i++) result += static_cast<char>(value >> (8 * i));
  return result;
}

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
  const auto crc = number(crc32, 4);
  file_.overwrite(begin_ + entries_[entry].place + kCrcInEntry, std::as_bytes(std::span(crc)));
}

// All numbers are written with 64 bits, whatever their size, so that there is one code path, which every test takes.
std::string ZipWriter::common_of(const Entry& entry) {
  return number(kZipVersion, 2) + number(kUtf8Names, 2) + number(0, 2) + number(0, 2) + number(kFirstDay, 2) + number(entry.crc32, 4) +
         number(kElsewhere, 4) + number(kElsewhere, 4) + number(entry.name.size(), 2);
}

std::string ZipWriter::sizes_of(const Entry& entry) {
  return number(entry.bytes, 8) + number(entry.bytes, 8);
}

void ZipWriter::write_header(Entry entry) {
  entry.place = end_ - begin_;
  const auto sizes = sizes_of(entry);
  auto extra = number(kWide, 2) + number(sizes.size(), 2) + sizes;
  const auto unaligned = entry.place + kEntryBytes + entry.name.size() + extra.size() + 4;
  const auto padding = (kAlignment - unaligned % kAlignment) % kAlignment;
  extra += number(kPadding, 2) + number(padding, 2) + std::string(padding, 'Z');
  const auto header = number(kEntry, 4) + common_of(entry) + number(extra.size(), 2) + entry.name + extra;
  write(std::as_bytes(std::span(header)));
  entries_.push_back(std::move(entry));
}

std::string ZipWriter::record_of(const Entry& entry) {
  const auto sizes = sizes_of(entry);
  const auto wide = number(kWide, 2) + number(sizes.size() + 8, 2) + sizes + number(entry.place, 8);
  return number(kRecord, 4) + number(kZipVersion, 2) + common_of(entry) + number(wide.size(), 2) + number(0, 2) + number(0, 2) +
         number(0, 2) + number(0, 4) + number(kElsewhere, 4) + entry.name + wide;
}

uint64_t ZipWriter::close() {
  std::string directory;
  for (const auto& entry : entries_) directory += record_of(entry);
  checksum_ = checksum_of(directory);
  const uint64_t count = entries_.size(), first = end_ - begin_, wide_end = first + directory.size();
  directory += number(kWideEnd, 4) + number(kWideEndBytes - 12, 8) + number(kZipVersion, 2) + number(kZipVersion, 2) + number(0, 4) +
               number(0, 4) + number(count, 8) + number(count, 8) + number(wide_end - first, 8) + number(first, 8);
  directory += number(kWideLocator, 4) + number(0, 4) + number(wide_end, 8) + number(1, 4);
  directory +=
      number(kEnd, 4) + number(0, 4) + number(0xffff, 2) + number(0xffff, 2) + number(kElsewhere, 4) + number(kElsewhere, 4) + number(0, 2);
  write(std::as_bytes(std::span(directory)));
  return end_ - begin_;
}

void ZipWriter::write(std::span<const std::byte> bytes) {
  file_.write(bytes);
  end_ += bytes.size();
}

}  // namespace tessera::checkpoint
