#include "tessera/shard/memory/unit_memory.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <array>
#include <vector>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/shard/options.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 3> kResidences = {"auto", "gathered", "node-shared"};

Residence wanted(std::optional<Residence> option) {
  if (option) return *option;
  const auto given = env_choice("TESSERA_RESIDENCE", kResidences);
  return given ? static_cast<Residence>(*given) : Residence::Auto;
}

}  // namespace

void expect_possible(OffloadTo to, std::string_view what, const DiskMemoryOptions& disk, at::Device device) {
  if (to == OffloadTo::Nowhere) return;
  if (to == OffloadTo::Host) {
    if (device.is_cpu())
      throw ConfigError("OffloadTo::Host has no effect on {}, already in host memory; leave it out, or set OffloadTo::Disk to use files",
                        what);
    throw ConfigError(
        "{} can't go to host memory while the parameters stay on {}, because all tensors of an update must be in the same memory; set "
        "OffloadOptions::parameters to OffloadTo::Host, which moves gradients and the state of optimizers as well",
        what, device.str());
  }
  if (!device.is_cpu()) throw ConfigError("can't offload {} from {} to disk; OffloadTo::Disk is for host memory only", what, device.str());
  expect_sensible(disk);
}

namespace {

/// Returns the memory of a unit whose shards are in host memory while a device computes with it.
UnitMemory pinned_memory(const ShardOptions& options, c10::Device device) {
  const auto& shard = options.mesh->shard();
  if (shard.traits().traces) {
    throw ConfigError("transport {} has the shards of all ranks in its program, so they can't go to host memory; leave OffloadOptions out",
                      shard.traits().name);
  }
  if (options.offload.gradients == OffloadTo::Disk) {
    throw ConfigError("gradients of parameters in host memory are there as well and can't be on disk; leave OffloadOptions::gradients out");
  }
  if (options.residence == Residence::NodeShared) {
    throw ConfigError("ranks can't share parameters in memory if a device computes with them; leave ShardOptions::residence at Auto");
  }
  return gathered_memory(shard, {}, device);
}

}  // namespace

void give_mean(std::span<const Piece> pieces, const TakeMean& take) {
  take([&](size_t piece, int64_t begin, const at::Tensor& target) {
    at::Tensor(target).copy_(pieces[piece].own.narrow(0, begin, target.numel()));
  });
}

uint64_t UnitMemory::unsharded_bytes(std::span<const Buffer> buffers) const {
  uint64_t bytes = 0;
  for (const auto& buffer : buffers) bytes += chunks->in_place(buffer) ? 0 : buffer.unsharded->nbytes();
  return bytes;
}

uint64_t UnitMemory::gathered_bytes(std::span<const Buffer> buffers, int ranks) const {
  uint64_t bytes = chunks->fetched_bytes();
  for (const auto& buffer : buffers) {
    if (chunks->in_place(buffer)) continue;
    const auto sent = buffer.sent_form();
    bytes += static_cast<uint64_t>(sent.numel) * c10::elementSize(sent.dtype) * static_cast<uint64_t>(ranks - 1);
  }
  return bytes;
}

void UnitMemory::release(std::span<const Buffer> buffers, Works unsharding) const {
  for (const auto& work : unsharding) {
    try {
      work.wait();  // the work writes to the memory that is released below
    } catch (const std::exception&) {
      // Resharding does not need the result. Code that does need the unit gets the error when it waits itself.
    }
  }
  for (const auto& buffer : buffers) buffer.unsharded->release();
  evict(buffers);
}

void UnitMemory::evict(std::span<const Buffer> buffers) const {
  if (!disk) return;
  for (const auto& buffer : buffers) evict_pages(buffer.own.const_data_ptr(), buffer.own.nbytes());
}

UnitMemory make_unit_memory(const ShardOptions& options, bool decodes, at::Device device) {
  const auto& shard = options.mesh->shard();
  const auto& offload = options.offload;
  if (offload.parameters == OffloadTo::Host && !device.is_cpu()) return pinned_memory(options, device);
  expect_possible(offload.parameters, "the parameters", offload.disk, device);
  expect_possible(offload.gradients, "the gradients", offload.disk, device);
  if (offload.parameters == OffloadTo::Disk) {
    if (options.residence == Residence::NodeShared)
      throw ConfigError("parameters that ranks share in memory can't be offloaded to disk as well; leave ShardOptions::residence at Auto");
    return gathered_memory(shard, offload.disk);
  }
  const auto residence = wanted(options.residence);
  if (residence == Residence::Gathered) return gathered_memory(shard);
  std::string why_not;
  if (!device.is_cpu()) {
    why_not = fmt::format("the parameters are on {}, not in host memory", device.str());
  } else if (decodes) {
    why_not = "their codec decodes the values that were sent, which every rank does in memory of its own";
  } else if (const auto& traits = shard.traits(); residence == Residence::Auto && traits.levels == 2) {
    const int here = static_cast<int>(traits.topology.ranks_on(traits.topology.host_of(shard.rank())).size());
    why_not = fmt::format(
        "the ranks are on {} hosts; residence node-shared would send parameters once for each version, not once for each use, but keep "
        "all of them in the memory of each host: 1/{} of the parameters a rank on this host, instead of 1/{}",
        traits.topology.hosts(), here, shard.size());
  } else if (auto shared = node_shared_memory(shard, why_not)) {
    return std::move(*shared);
  }
  if (residence == Residence::NodeShared)
    throw ConfigError(
        "parameters can't be shared by the ranks of this host: {}; leave ShardOptions::residence and TESSERA_RESIDENCE "
        "at auto, or choose gathered",
        why_not);
  static std::once_flag logged;  // so that the message is logged once, not for every unit
  std::call_once(logged, [&] { log(LogLevel::Info, "parameters are gathered, not shared by the ranks of this host: {}", why_not); });
  return gathered_memory(shard);
}

Communicator consecutive_ranks(const Communicator& shard, int ranks) {
  std::vector<int> colors;
  for (int rank = 0; rank < shard.size(); rank++) colors.push_back(rank / ranks);
  return shard.part(colors);
}

namespace {

at::Tensor unsharded_values(const Buffer& buffer) {
  return buffer.unsharded->memory_view(buffer.unsharded_dtype());
}

}  // namespace

KeptPart::KeptPart(const Communicator& shard, int ranks) : few_(consecutive_ranks(shard, ranks)) {}

void KeptPart::keep(std::span<const Buffer> buffers) {
  for (const auto& buffer : buffers) parts_.push_back(few_.own_chunk(unsharded_values(buffer)).clone());
}

uint64_t KeptPart::bytes() const {
  uint64_t bytes = 0;
  for (const auto& part : parts_) bytes += part.nbytes();
  return bytes;
}

Works KeptPart::fill(std::span<const Buffer> buffers, const Subject& subject, std::span<at::Tensor> operands) const {
  for (const auto& buffer : buffers) buffer.unsharded->allocate(subject.unit);
  Works works;
  size_t next = 0;
  for_each_group(
      buffers, [](const Buffer& buffer) { return buffer.unsharded_dtype(); },
      [&](std::span<const Buffer> run) {
        c10::SmallVector<Piece, 2> pieces;
        for (const auto& buffer : run) pieces.push_back({.whole = unsharded_values(buffer), .own = parts_[next++]});
        works.push_back(few_.all_gather(pieces, subject, operands));
      });
  return works;
}

}  // namespace tessera
