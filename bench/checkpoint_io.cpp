// Measures reading and writing of files of tensors: opening a file with many tensors, and checksums compared with copying.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <filesystem>

#include "bench.h"
#include "tessera/checkpoint/formats/safetensors.h"

namespace {

using namespace tessera::checkpoint;
using bench::best_of, bench::seconds_of;

void measure_opening(const std::filesystem::path& file) {
  for (const int count : {1'000, 10'000, 100'000}) {
    std::vector<SafetensorsEntry> entries;
    for (int i = 0; i < count; i++)
      entries.push_back({.name = fmt::format("model.layers.{}.self_attention.weight", i), .dtype = at::kFloat, .sizes = {2}});
    const auto tensor = at::ones({2});
    const auto writing = seconds_of([&] {
      SafetensorsWriter writer(file, entries);
      for (int i = 0; i < count; i++) writer.write(tensor);
      writer.close();
    });
    const auto opening = best_of(3, [&] { SafetensorsFile opened(file); });
    fmt::print("{:>7} tensors: opened in {:.1f} ms, {:.2f} us each; written in {:.0f} ms\n", count, opening * 1e3, opening / count * 1e6,
               writing * 1e3);
  }
}

void measure_checksums(const std::filesystem::path& file) {
  constexpr int64_t kBytes = int64_t{512} << 20;
  const auto tensor = at::ones({kBytes / 4});
  const auto target = at::empty_like(tensor);
  const auto gigabytes = static_cast<double>(kBytes) / 1e9;
  const auto copying = best_of(5, [&] { std::memcpy(target.data_ptr(), tensor.data_ptr(), static_cast<size_t>(kBytes)); });
  const auto hashing = best_of(5, [&] {
    Checksum checksum;
    checksum.add({static_cast<const std::byte*>(tensor.data_ptr()), static_cast<size_t>(kBytes)});
  });
  SafetensorsWriter writer(file, {{.name = "w", .dtype = at::kFloat, .sizes = {kBytes / 4}}});
  const auto writing = seconds_of([&] { writer.write(tensor); });
  const auto syncing = seconds_of([&] { writer.close(); });
  const SafetensorsFile opened(file);
  const auto verifying = best_of(3, [&] { opened.verify("w"); });
  const auto reading = best_of(3, [&] { opened.read("w"); });
  fmt::print(
      "memcpy {:.1f} GB/s, checksum {:.1f} GB/s; write {:.1f} GB/s and sync {:.2f} s; verify {:.1f} GB/s, read {:.1f} GB/s (cached)\n",
      gigabytes / copying, gigabytes / hashing, gigabytes / writing, syncing, gigabytes / verifying, gigabytes / reading);
}

}  // namespace

int main() {
  const auto file = std::filesystem::temp_directory_path() / "tessera-bench-checkpoint-io";
  measure_opening(file);
  measure_checksums(file);
  std::filesystem::remove(file);
}
