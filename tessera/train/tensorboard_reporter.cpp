#include "tessera/train/tensorboard_reporter.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <bit>
#include <chrono>
#include <string_view>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/base/process.h"

namespace tessera::train {
namespace {

constexpr std::string_view kFirstOfName = "events.out.tfevents.";

// --- protocol buffers: the few fields that scalars need ----------------------------------------------------------------------------------

constexpr int kVersionOfFile = 3, kSummary = 5, kSessionLog = 7;  // fields of an event, besides its time (1) and its step (2)

template <class Number>
std::string little_endian(Number number) {
  static_assert(std::endian::native == std::endian::little);
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

std::string varint(uint64_t number) {
  std::string result;
  for (; number >= 0x80; number >>= 7) result += static_cast<char>(number | 0x80);
  return result + static_cast<char>(number);
}

enum class Wire { Varint = 0, Eight = 1, Bytes = 2, Four = 5 };

std::string key(int field, Wire wire) {
  return varint(static_cast<uint64_t>(field) << 3 | static_cast<uint64_t>(wire));
}

std::string bytes_field(int field, std::string_view bytes) {
  return key(field, Wire::Bytes) + varint(bytes.size()).append(bytes);
}

std::string varint_field(int field, int64_t number) {
  return key(field, Wire::Varint) + varint(static_cast<uint64_t>(number));
}

/// A value of a summary: its tag (1) and its number (2).
std::string scalar(const Value& value) {
  return bytes_field(1, value.name) + key(2, Wire::Four) + little_endian(static_cast<float>(value.value));
}

// --- records: length, checksum of the length, bytes, checksum of the bytes ---------------------------------------------------------------

constexpr auto kCastagnoli = [] {
  std::array<uint32_t, 256> table{};
  for (uint32_t i = 0; i < table.size(); i++) {
    table[i] = i;
    for (int bit = 0; bit < 8; bit++) table[i] = table[i] >> 1 ^ ((table[i] & 1) != 0 ? 0x82f63b78U : 0U);
  }
  return table;
}();

/// CRC-32C, masked as the format demands, because a plain CRC of bytes that contain CRCs would be weak.
std::string masked_checksum(std::string_view bytes) {
  uint32_t crc = ~0U;
  for (const char byte : bytes) crc = crc >> 8 ^ kCastagnoli[(crc ^ static_cast<unsigned char>(byte)) & 0xff];
  return little_endian(std::rotr(~crc, 15) + 0xa282ead8U);
}

std::string record_of(std::string_view bytes) {
  const auto length = little_endian(uint64_t{bytes.size()});
  return length + masked_checksum(length) + std::string(bytes) + masked_checksum(bytes);
}

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

/// Returns the time in the name of a new file. TensorBoard reads the files of a folder in the order of their names, so the time is later
/// than those of all other files, even if they were made in the same second or the clock was set back.
int64_t time_of_next(const std::filesystem::path& folder) try {
  auto time = static_cast<int64_t>(seconds_now());
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    const auto name = entry.path().filename().string();
    const auto other = name.starts_with(kFirstOfName) ? leading_number(std::string_view(name).substr(kFirstOfName.size())) : std::nullopt;
    if (other) time = std::max(time, *other + 1);
  }
  return time;
} catch (const std::filesystem::filesystem_error& error) {
  throw IoError("the metrics folder {} can't be read: {}", folder, error.what());
}

}  // namespace

TensorBoardReporter::TensorBoardReporter(std::filesystem::path folder, const ReporterOptions& options) : path_(std::move(folder)) {
  if (options.rank != 0) return;
  make_folders_for(path_ / kFirstOfName);
  path_ /= fmt::format("{}{:010}.{}.{}", kFirstOfName, time_of_next(path_), host_name(), ::getpid());
  file_ = open_report(path_, O_APPEND | O_EXCL);
  write_event(0, bytes_field(kVersionOfFile, "brain.Event:2"));
  constexpr int64_t kStart = 1;
  // TensorBoard drops the values of all names from this step on, so take the largest of all first steps.
  auto first = options.first_step;
  for (const auto& [name, step] : options.first_of) first = std::max(first, step);
  write_event(first, bytes_field(kSessionLog, varint_field(1, kStart)));
}

void TensorBoardReporter::write(int64_t step, const Values& values) {
  if (!file_) return;
  expect_names(path_, step, values);
  std::string summary;
  for (const auto& value : values) summary += bytes_field(1, scalar(value));
  write_event(step, bytes_field(kSummary, summary));
}

void TensorBoardReporter::write_event(int64_t step, const std::string& what) {
  const auto time = key(1, Wire::Eight) + little_endian(seconds_now());
  write_report(file_, path_, step, record_of(time + varint_field(2, step) + what));
}

}  // namespace tessera::train
