#include "tessera/checkpoint/live/dict_source.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/comm/groups/all_or_none.h"
#include "tessera/comm/groups/same_on_all.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"

namespace tessera::checkpoint {
namespace {

void expect_ordinary(const std::string& name, const at::Tensor& tensor) {
  const auto refuse = [&](std::string_view why) { throw UsageError("'{}' in the state dict is {}", name, why); };
  if (!tensor.defined()) refuse("undefined; leave it out");
  if (tensor.layout() != at::kStrided) refuse("not a dense tensor; convert it with to_dense()");
  if (tensor.is_meta()) refuse("a tensor on the meta device, which has no values; call materialize for its module");
  if (tensor.key_set().has(kPagingKey))
    refuse("a shard or a member of a sharded model; make the state dict with full_state_dict or sharded_state_dict");
}

ShardedTensor checked(const std::string& name, const at::Tensor& tensor) {
  expect_ordinary(name, tensor);
  return {.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec(), .slices = {whole_slice(tensor.sizes())}, .values = {tensor}};
}

ShardedTensor checked(const std::string& name, const ShardedTensor& tensor) {
  if (tensor.slices.size() != tensor.values.size()) {
    throw UsageError("'{}' in the state dict has {} slices, but values for {}", name, tensor.slices.size(), tensor.values.size());
  }
  for (size_t i = 0; i < tensor.slices.size(); i++) {
    expect_ordinary(name, tensor.values[i]);
    const auto& slice = tensor.slices[i];
    if (slice.shape == tensor.shape && slice.fits() && tensor.values[i].sizes() == at::IntArrayRef(slice.sizes)) continue;
    throw UsageError("'{}' in the state dict has values of [{}] for the slice {} of [{}]", name, joined(tensor.values[i].sizes()),
                     to_string(slice), joined(tensor.shape));
  }
  return tensor;
}

ShardedTensor checked(const std::string& name, const LocalTensor& tensor) {
  expect_ordinary(name, tensor.values);
  const auto fits = [&](const TensorSlice& slice) { return slice.shape == tensor.shape && slice.fits(); };
  const auto numel = PartRecord{.shape = {}, .strides = {}, .slices = tensor.slices}.numel();
  if (tensor.values.dim() != 1 || tensor.values.numel() != numel || tensor.strides.size() != tensor.shape.size() ||
      !std::ranges::all_of(tensor.slices, fits)) {
    throw UsageError("'{}' in the state dict has values of [{}], but its slices of [{}] have {} values", name,
                     joined(tensor.values.sizes()), joined(tensor.shape), numel);
  }
  return checked(name, boxes_of(tensor));
}

template <class Dict>
ShardedStateDict checked(const Dict& dict) {
  ShardedStateDict boxes;
  for (const auto& [name, tensor] : dict) boxes[name] = checked(name, tensor);
  return boxes;
}

std::string to_text(const ShardedStateDict& dict) {
  auto list = nlohmann::json::array();
  for (const auto& [name, tensor] : dict) list.push_back({name, static_cast<int>(tensor.dtype), tensor.shape});
  return list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

/// Returns the dict that another rank has described with to_text(), without values.
ShardedStateDict described(const std::string& text) {
  ShardedStateDict dict;
  for (const auto& item : nlohmann::json::parse(text)) {
    auto& tensor = dict[item[0].get<std::string>()];
    tensor = {.dtype = static_cast<at::ScalarType>(item[1].get<int>()), .shape = item[2].get<std::vector<int64_t>>()};
    tensor.slices = {whole_slice(tensor.shape)};
  }
  return dict;
}

/// Returns this rank's dict as boxes. Throws DisagreementError unless all ranks have the same names, dtypes and shapes.
template <class Dict>
ShardedStateDict agreed(const Communicator& world, std::string_view failure, const Dict& dict) {
  ShardedStateDict boxes;
  all_or_none(world, kStateDict, failure, [&] { boxes = checked(dict); });
  if (same_on_all(world, checksum_value(to_text(boxes)), kStateDict)) return boxes;
  throw DisagreementError(
      "ranks load state dicts that have different names, dtypes or shapes (this rank's has {} tensors); give all ranks the same "
      "dict, or load that of rank 0 on all of them (broadcast_from_rank0). Nothing was changed",
      boxes.size());
}

/// Throws DisagreementError unless all ranks have the same values. Each rank loads its part from its own dict, so different dicts would be
/// mixed without an error.
void expect_same_values(const Communicator& world, const StateDict& dict, std::string_view failure) {
  std::string sums;  // in the order of names, which are the same on all ranks after agreed()
  all_or_none(world, kStateDict, failure, [&] {
    for (const auto& [name, tensor] : dict) {
      const auto values = tensor.detach().to(at::kCPU).contiguous();
      sums += Checksum::text(checksum_value({static_cast<const char*>(values.const_data_ptr()), values.nbytes()}));
    }
  });
  if (same_on_all(world, checksum_value(sums), kStateDict)) return;
  const auto of_ranks = world.texts(sums, kStateDict);
  std::vector<std::string> names;
  size_t at = 0;
  for (const auto& [name, tensor] : dict) {
    const auto differs = [&](const std::string& other) {
      return other.compare(at, Checksum::kDigits, of_ranks[0], at, Checksum::kDigits) != 0;
    };
    if (std::ranges::any_of(of_ranks, differs)) names.push_back(name);
    at += Checksum::kDigits;
  }
  throw DisagreementError(
      "ranks load state dicts with different values of '{}'{}; give all ranks the same dict, or load that of rank 0 on all of them "
      "(broadcast_from_rank0). Nothing was changed",
      names.front(), names.size() > 1 ? fmt::format(" and {} more", names.size() - 1) : "");
}

/// Whether two tensors have the same dtype, shape and bits.
bool are_same(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_same(other)) return true;
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.detach().contiguous().view({-1}).view(at::kByte); };
  return at::equal(bytes(one), bytes(other).to(one.device()));
}

class DictSource : public ValueSource {
 public:
  /// `lacks` begins the error of a rank whose boxes lack values. If `from_first` is given, only rank 0 has values, which open() broadcasts.
  DictSource(ShardedStateDict dict, std::string_view lacks, std::optional<Communicator> from_first = {})
      : dict_(std::move(dict)), lacks_(lacks), from_first_(std::move(from_first)) {
    for (const auto& [name, tensor] : dict_) {
      auto& there = catalog_.tensors[name] = {.dtype = tensor.dtype, .shape = tensor.shape};
      for (const auto& slice : tensor.slices) there.boxes.push_back({.box = slice, .file = there.boxes.size()});
    }
  }

  const Catalog& catalog() const override { return catalog_; }

  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> /*parts*/) const override {
    const auto &first = dict_.at(one), &second = dict_.at(other);
    return first.slices == second.slices && std::ranges::equal(first.values, second.values, are_same);
  }

  void expect_parts(const std::string& name, std::span<const PartRecord> parts) const override {
    for (const auto& part : parts) {
      for (const auto& slice : part.slices) {
        const auto missing = for_each_part(catalog_.tensors.at(name), slice, 0, [](const StoredBox&, const TensorSlice&) {});
        if (missing.empty()) continue;
        throw UsageError(
            "{} lacks the values {} of '{}', which this rank needs; load it on the same ranks with the same sharding, or load a "
            "full state dict",
            lacks_, to_string(missing.front()), name);
      }
    }
  }

  void open(const std::string& name) override {
    if (!from_first_) return;
    opened_ = at::Tensor();  // frees the previous tensor before the next is allocated
    const auto& tensor = dict_.at(name);
    const auto device = from_first_->traits().device;
    opened_ = from_first_->is_first() ? tensor.values.front().detach().to(device).contiguous()
                                      : at::empty(tensor.shape, at::TensorOptions(device).dtype(tensor.dtype));
    if (opened_.numel() > 0) from_first_->broadcast(opened_, 0, kStateDict).wait();
  }

  void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int /*rank*/) const override {
    const auto views = views_of_slices(values, part.slices, part.strides);
    for (size_t i = 0; i < views.size(); i++) {
      for_each_part(catalog_.tensors.at(name), part.slices[i], 0, [&](const StoredBox& stored, const TensorSlice& own) {
        const auto& box = from_first_ ? opened_ : dict_.at(name).values[stored.file];
        part_of(views[i], part.slices[i], own).copy_(part_of(box.detach(), stored.box, own));
      });
    }
  }

 private:
  const ShardedStateDict dict_;
  const std::string lacks_;
  const std::optional<Communicator> from_first_;
  Catalog catalog_;
  at::Tensor opened_;
};

template <class Dict>
std::unique_ptr<ValueSource> source_of_parts(const Dict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                             std::string_view failure, std::string_view lacks) {
  if (options.broadcast_from_rank0)
    throw UsageError("broadcast_from_rank0 is for full state dicts; in a sharded or local state dict each rank has its own part");
  return std::make_unique<DictSource>(agreed(world, failure, dict), lacks);
}

}  // namespace

Communicator world_for(const torch::nn::Module& model, const LoadStateDictOptions& options) {
  const auto world = world_of(model);
  if (!world && options.broadcast_from_rank0) {
    throw UsageError(
        "broadcast_from_rank0: the model is not sharded, so it does not know of other ranks; shard it first, or give each rank the dict");
  }
  return world ? *world : self_world();
}

void expect_own_part(const Communicator& world, const StateDictOptions& options) {
  if (options.rank0_only)
    throw UsageError("rank0_only is for full state dicts; in a sharded or local state dict each rank has its own part");
  if (world.local_ranks().size() == 1) return;
  throw UsageError(
      "this process represents {} ranks, but a sharded or local state dict is that of one rank; use full_state_dict, or "
      "checkpoint::save",
      world.local_ranks().size());
}

at::Tensor copied(const at::Tensor& tensor, const StateDictOptions& options) {
  const auto device = options.offload_to_cpu ? c10::Device(at::kCPU) : tensor.device();
  return tensor.to(device, tensor.scalar_type(), /*non_blocking=*/false, /*copy=*/true);
}

ShardedTensor boxes_of(LocalTensor tensor) {
  auto views = views_of_slices(tensor.values, tensor.slices, tensor.strides);
  return {.dtype = tensor.values.scalar_type(),
          .shape = std::move(tensor.shape),
          .slices = std::move(tensor.slices),
          .values = std::move(views)};
}

std::unique_ptr<ValueSource> source_of(const StateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure) {
  constexpr std::string_view kLacks = "the state dict";
  const bool all_here = std::ssize(world.local_ranks()) == world.size();
  if (!options.broadcast_from_rank0 || all_here) {
    auto boxes = agreed(world, failure, dict);
    if (!all_here) expect_same_values(world, dict, failure);
    return std::make_unique<DictSource>(std::move(boxes), kLacks);
  }
  ShardedStateDict boxes;
  all_or_none(world, kStateDict, failure, [&] {
    if (world.is_first()) boxes = checked(dict);
  });
  const auto text = world.texts(to_text(boxes), kStateDict).front();
  if (!world.is_first()) boxes = described(text);
  return std::make_unique<DictSource>(std::move(boxes), kLacks, world);
}

std::unique_ptr<ValueSource> source_of(const ShardedStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure) {
  return source_of_parts(dict, options, world, failure, "the sharded state dict");
}

std::unique_ptr<ValueSource> source_of(const LocalStateDict& dict, const LoadStateDictOptions& options, const Communicator& world,
                                       std::string_view failure) {
  return source_of_parts(dict, options, world, failure, "the local state dict is of another layout: it");
}

}  // namespace tessera::checkpoint
