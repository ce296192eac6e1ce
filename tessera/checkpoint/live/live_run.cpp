#include "tessera/checkpoint/live/live_run.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <utility>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/comm/groups/all_or_none.h"

namespace tessera::checkpoint {
namespace {

/// A safetensors file in memory, whose values are read from tensors.
class Memory {
 public:
  explicit Memory(std::string header) : head_(kLengthBytes, '\0') {
    const uint64_t length = header.size();
    std::memcpy(head_.data(), &length, sizeof length);
    head_ += header;
  }

  /// Adds the rank's tensors, in the order of the header.
  void add(const std::vector<std::pair<std::string, at::Tensor>>& tensors) {
    uint64_t begin = head_.size();
    for (const auto& [name, tensor] : tensors) {
      const auto values = tensor.detach().resolve_conj().resolve_neg().contiguous().as_strided({tensor.numel()}, {1}).view(at::kByte);
      if (values.numel() > 0) tensors_.emplace(begin, values);
      begin += values.nbytes();
    }
  }

  void read(void* to, uint64_t count, uint64_t offset) const {
    auto* next = static_cast<char*>(to);
    while (count > 0) {
      const auto copied = offset < head_.size() ? copy_head(next, count, offset) : copy_values(next, count, offset);
      next += copied;
      offset += copied;
      count -= copied;
    }
  }

 private:
  uint64_t copy_head(char* to, uint64_t count, uint64_t offset) const {
    count = std::min<uint64_t>(count, head_.size() - offset);
    std::memcpy(to, head_.data() + offset, count);
    return count;
  }

  uint64_t copy_values(char* to, uint64_t count, uint64_t offset) const {
    const auto behind = tensors_.upper_bound(offset);
    if (behind == tensors_.begin()) throw Error("a rank's values were asked for where there are none");
    const auto& [begin, values] = *std::prev(behind);
    const auto place = static_cast<int64_t>(offset - begin);
    const auto bytes = std::min(static_cast<int64_t>(count), values.numel() - place);
    at::from_blob(to, {bytes}, at::TensorOptions(at::kByte)).copy_(values.narrow(0, place, bytes));
    return static_cast<uint64_t>(bytes);
  }

  std::string head_;
  std::map<uint64_t, at::Tensor> tensors_;  // by their offsets in the file
};

/// Returns the header of a rank's file, but without checksums of the values, and the size of the file in bytes.
std::pair<std::string, int64_t> header_of(const RankContents& rank) {
  const auto entries = entries_of(rank);
  auto [text, place] = SafetensorsHeaderText(entries, to_metadata(rank.record));
  text.replace(place, Checksum::kDigits, checksum_of(text));
  auto bytes = static_cast<int64_t>(kLengthBytes + text.size());
  for (const auto& entry : entries) bytes += entry.bytes();
  return {text, bytes};
}

}  // namespace

LiveRun live_run(const std::vector<RankContents>& own, const Communicator& world, std::string_view failure) {
  const auto together = [&](c10::function_ref<void()> act) { all_or_none(world, {.unit = "checkpoint"}, failure, act); };
  std::map<int, std::pair<std::string, int64_t>> headers;
  std::map<int, std::shared_ptr<Memory>> memories;
  together([&] {
    for (const auto& rank : own) {
      const auto number = rank.record.rank;
      headers[number] = header_of(rank);
      memories[number] = std::make_shared<Memory>(headers[number].first);
      memories[number]->add(rank.tensors);
    }
  });
  auto texts = world.texts(nlohmann::json(headers).dump(), {.unit = "checkpoint"});
  for (auto& text : texts) headers.merge(nlohmann::json::parse(std::exchange(text, {})).get<decltype(headers)>());  // frees text by text
  const auto file_of = [&](int rank, std::shared_ptr<const Memory> memory) {
    return InputFile(fmt::format("the memory of rank {}", rank), static_cast<uint64_t>(headers.at(rank).second),
                     [memory = std::move(memory)](void* to, uint64_t count, uint64_t offset) {
                       if (memory == nullptr) throw Error("a rank's values were asked for in another process");
                       memory->read(to, count, offset);
                     });
  };
  LiveRun result;
  together([&] {
    result.run = manifest_of(world.size(), [&](int rank) {
      const auto memory = std::make_shared<Memory>(std::exchange(headers.at(rank).first, {}));
      return open_rank_file(SafetensorsFile(file_of(rank, memory)), rank, world.size());
    });
    result.run.catalog.checksums.clear();
    for (int rank = 0; rank < world.size(); rank++) {
      const auto memory = memories.find(rank);
      result.memories.push_back(file_of(rank, memory == memories.end() ? nullptr : memory->second));
    }
  });
  return result;
}

}  // namespace tessera::checkpoint
