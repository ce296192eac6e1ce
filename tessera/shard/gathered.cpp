// The residence that works everywhere: across machines, on any device.
#include <ATen/ATen.h>
#include <fmt/format.h>

#include "tessera/shard/marker.h"
#include "tessera/shard/residence.h"

namespace tessera {
namespace {

class Gathered final : public Residence {
 public:
  explicit Gathered(Communicator shard) : shard_(std::move(shard)) {}

  std::vector<Work> read(std::span<const Buffer> buffers, Subject subject, const Fault& fault) override {
    // One call for all buffers of a dtype: a tracing engine ties them together, an eager one saves an exchange.
    std::vector<Work> works;
    for (const auto& buffer : buffers) fill(*buffer.full);  // all of it, before anything is under way that can't be called back
    for (size_t first = 0; first < buffers.size();) {
      std::vector<Piece> pieces;
      size_t next = first;
      for (; next < buffers.size() && buffers[next].full_dtype == buffers[first].full_dtype; next++) {
        const auto& buffer = buffers[next];
        pieces.push_back({.whole = memory_view(*buffer.full, buffer.full_dtype), .own = buffer.own.to(buffer.full_dtype)});
      }
      works.push_back(shard_.all_gather(pieces, subject, fault.companions));
      first = next;
    }
    return works;
  }

  void give_back(std::span<const Buffer> buffers, const std::string& unit) override {
    for (const auto& buffer : buffers) {
      drain(*buffer.full,
            fmt::format("the parameters of unit '{}' are sharded and not in memory now; operators bring them in by themselves, "
                        "raw pointers need tessera::full_params(module)",
                        unit));
    }
  }

  void write() override {}

  uint64_t whole_bytes(std::span<const Buffer> buffers) const override {
    uint64_t bytes = 0;
    for (const auto& buffer : buffers) bytes += buffer.full->nbytes();
    return bytes;
  }

 private:
  Communicator shard_;
};

}  // namespace

std::unique_ptr<Residence> gathered_residence(Communicator shard) {
  return std::make_unique<Gathered>(std::move(shard));
}

}  // namespace tessera
