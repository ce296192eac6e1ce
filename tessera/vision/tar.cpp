#include "tessera/vision/tar.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/words.h"

namespace tessera::vision {
namespace {

constexpr uint64_t kTarBlock = 512;
constexpr uint64_t kTarWindow = 4096;  // is read at once: mostly a short file and the headers around it are in it
constexpr uint64_t kTarBeginning = 15;
constexpr uint64_t kLongestRecord = 1 << 20;  // the most bytes of a long name, or of records of pax

/// A header's fields.
struct TarField {
  size_t begin, length;
};
constexpr TarField kTarName{0, 100}, kTarSize{124, 12}, kTarSum{148, 8}, kTarType{156, 1}, kTarMagic{257, 6}, kTarPrefix{345, 155};

std::string_view field_of(std::string_view header, TarField field) {
  return header.substr(field.begin, field.length);
}

std::string text_of(std::string_view field) {
  return std::string(field.substr(0, field.find('\0')));
}

/// Octal digits, or as GNU has it for large numbers, a byte of 0x80 and then a binary number, big-endian.
std::optional<uint64_t> number_in(std::string_view field) {
  uint64_t value = 0;
  if (field[0] == '\x80') {
    for (const auto byte : field.substr(1)) {
      if (value >> 56 != 0) return std::nullopt;
      value = value << 8 | static_cast<uint8_t>(byte);
    }
    return value;
  }
  field.remove_prefix(std::min(field.find_first_not_of(' '), field.size()));
  field = field.substr(0, field.find_first_of(std::string_view("\0 ", 2)));
  if (field.empty()) return 0;
  const auto [end, failure] = std::from_chars(field.data(), field.data() + field.size(), value, 8);
  return failure == std::errc{} && end == field.data() + field.size() ? std::optional(value) : std::nullopt;
}

/// Some old programs add the bytes up as signed numbers.
bool has_right_sum(std::string_view header) {
  const auto expected = number_in(field_of(header, kTarSum));
  if (!expected) return false;
  int64_t sum = 0, signed_sum = 0;
  for (size_t i = 0; i < header.size(); i++) {
    const bool is_sum = i >= kTarSum.begin && i < kTarSum.begin + kTarSum.length;
    const char byte = is_sum ? ' ' : header[i];
    sum += static_cast<uint8_t>(byte);
    signed_sum += static_cast<int8_t>(byte);
  }
  return std::cmp_equal(*expected, sum) || std::cmp_equal(*expected, signed_sum);
}

class TarReader {
 public:
  explicit TarReader(const InputFile& file) : file_(file) {}

  std::vector<TarMember> read() {
    while (file_.size() - at_ >= kTarBlock) {
      const auto header = bytes_at(at_, kTarBlock);
      if (header.find_first_not_of('\0') == std::string_view::npos) {
        has_ended_ = true;
        at_ += kTarBlock;
        continue;
      }
      expect_header(header);
      take(header);
    }
    if (!has_ended_) fail("the archive is cut off: the block of zeros that ends it is missing");
    return std::move(members_);
  }

 private:
  [[noreturn]] void fail(const std::string& why) const { throw IoError("{}, at byte {}: {}", file_.path(), at_, why); }

  /// Up to the next call.
  std::string_view bytes_at(uint64_t begin, uint64_t count) {
    if (begin < window_begin_ || begin + count > window_begin_ + window_.size()) {
      window_.resize(std::min(kTarWindow, file_.size() - begin));
      window_begin_ = begin;
      file_.read(window_.data(), window_.size(), begin);
    }
    return std::string_view(window_).substr(begin - window_begin_, count);
  }

  void expect_header(std::string_view header) const {
    if (has_ended_) {
      fail("the archive has ended, but there is more behind its end; of archives that were joined make one, by tar --concatenate");
    }
    if (at_ == 0 && header.starts_with("\x1f\x8b")) fail("the archive is compressed; unpack it: pictures are compressed themselves");
    if (has_right_sum(header)) return;
    fail(at_ == 0 ? "this is no tar archive, or its first header is damaged"
                  : "the header has another check sum than it says; it is damaged");
  }

  /// Takes the member at this place, and goes to the next one.
  void take(std::string_view header) {
    const char type = field_of(header, kTarType)[0];
    const bool is_record = type == 'L' || type == 'K' || type == 'x' || type == 'g';
    const auto name = is_record || !next_name_ ? name_in(header) : *next_name_;
    const auto size = is_record || !next_size_ ? number_in(field_of(header, kTarSize)) : next_size_;
    if (!size) fail("the header has no size that can be read; it is damaged");
    const bool has_bytes = is_record || type == '0' || type == '\0' || type == '7';
    const auto begin = at_ + kTarBlock;
    if (has_bytes && *size > file_.size() - begin) {
      fail(formatted("'{}' has {} bytes, but the archive is cut off {} bytes behind its header", printable(name), *size,
                     file_.size() - begin));
    }
    if (is_record) {
      take_record(type, begin, *size);
    } else {
      take_member(type, name, begin, *size);
      next_name_.reset();
      next_size_.reset();
    }
    const auto blocks = has_bytes ? (*size + kTarBlock - 1) / kTarBlock : 0;
    // The last block may be cut off, and then the archive's end is missing.
    at_ = std::min(begin + blocks * kTarBlock, file_.size());
  }

  void take_member(char type, const std::string& name, uint64_t begin, uint64_t size) {
    const auto shown = printable(name);
    if (type == '1' || type == '2')
      fail(
          formatted("'{}' is a link, which is not followed; pack files in place of links, by tar --dereference --hard-dereference", shown));
    if (type == '0' || type == '\0' || type == '7') {
      if (name.ends_with('/')) return;
      const std::string beginning(bytes_at(begin, std::min(size, kTarBeginning)));
      members_.push_back({.name = name, .offset = begin, .size = size, .beginning = beginning});
    } else if (type < '3' || type > '6') {
      fail(formatted("'{}' is a member of type '{}', which is not read; pack it anew as a plain file", shown,
                     printable(std::string_view(&type, 1))));
    }
  }

  /// A record about the next member. Of those for all members ('g') and of targets of links ('K') nothing is needed.
  void take_record(char type, uint64_t begin, uint64_t size) {
    if (type == 'g' || type == 'K') return;
    if (size > kLongestRecord) fail(formatted("a record about the next file has {} bytes, which is too long; it is damaged", size));
    std::string text(size, '\0');
    file_.read(text.data(), size, begin);
    if (type == 'L') {
      next_name_ = text_of(text);
    } else {
      take_pax(text);
    }
  }

  /// Lines "LENGTH KEY=VALUE", whose length counts all of it.
  void take_pax(std::string_view text) {
    while (!text.empty()) {
      const auto blank = text.find(' ');
      const auto length = blank == std::string_view::npos ? std::nullopt : number_of<size_t>(text.substr(0, blank));
      if (!length || *length < blank + 2 || *length > text.size() || text[*length - 1] != '\n') fail("a record of pax is damaged");
      const auto record = text.substr(blank + 1, *length - blank - 2);
      const auto equals = record.find('=');
      if (equals == std::string_view::npos) fail("a record of pax is damaged");
      take_pax(record.substr(0, equals), record.substr(equals + 1));
      text.remove_prefix(*length);
    }
  }

  void take_pax(std::string_view key, std::string_view value) {
    if (key == "path") next_name_ = text_of(value);
    if (key == "size") {
      next_size_ = number_of<uint64_t>(value);
      if (!next_size_) fail("a record of pax says no size that can be read; it is damaged");
    }
    if (key.starts_with("GNU.sparse.")) fail("the next file is packed without its zeros; pack it anew, without tar --sparse");
  }

  static std::string name_in(std::string_view header) {
    const auto name = text_of(field_of(header, kTarName)), prefix = text_of(field_of(header, kTarPrefix));
    // GNU has other things in the place of the prefix, and another magic.
    const bool has_prefix = field_of(header, kTarMagic) == std::string_view("ustar\0", 6) && !prefix.empty();
    return has_prefix ? prefix + '/' + name : name;
  }

  const InputFile& file_;
  uint64_t at_ = 0;
  std::string window_;
  uint64_t window_begin_ = 0;
  bool has_ended_ = false;
  std::optional<std::string> next_name_;
  std::optional<uint64_t> next_size_;
  std::vector<TarMember> members_;
};

}  // namespace

std::vector<TarMember> members_of_tar(const InputFile& file) {
  return TarReader(file).read();
}

}  // namespace tessera::vision
