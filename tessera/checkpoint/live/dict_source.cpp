#include "tessera/checkpoint/live/dict_source.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>

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
  if (tensor.layout() != at::kStrided) refuse("no dense tensor");
  if (tensor.is_meta()) refuse("a tensor of the meta device, which has no values; call materialize for the module that it is from");
  if (tensor.key_set().has(kPagingKey))
    refuse("a shard or a member of a sharded model; state dicts are made by full_state_dict and the like");
}

StoredTensor description_of(const std::string& name, const at::Tensor& tensor) {
  expect_ordinary(name, tensor);
  return {.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

StoredTensor description_of(const std::string& name, const ShardedTensor& tensor) {
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
  return {.dtype = tensor.dtype, .shape = tensor.shape};
}

StoredTensor description_of(const std::string& name, const LocalTensor& tensor) {
  expect_ordinary(name, tensor.values);
  const PartRecord part{.shape = tensor.shape, .strides = tensor.strides, .slices = tensor.slices};
  if (tensor.values.dim() != 1 || tensor.values.numel() != part.numel()) {
    throw UsageError("'{}' in the state dict has values of [{}], but its slices have {} values", name, joined(tensor.values.sizes()),
                     part.numel());
  }
  return {.dtype = tensor.values.scalar_type(), .shape = tensor.shape};
}

template <class Dict>
Catalog described(const Dict& dict) {
  Catalog catalog;
  for (const auto& [name, tensor] : dict) catalog.tensors[name] = description_of(name, tensor);
  return catalog;
}

std::string to_text(const Catalog& catalog) {
  auto list = nlohmann::json::array();
  for (const auto& [name, tensor] : catalog.tensors) list.push_back({name, static_cast<int>(tensor.dtype), tensor.shape});
  return list.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace);
}

Catalog catalog_of_text(const std::string& text) {
  Catalog catalog;
  for (const auto& item : nlohmann::json::parse(text)) {
    catalog.tensors[item[0].get<std::string>()] = {.dtype = static_cast<at::ScalarType>(item[1].get<int>()),
                                                   .shape = item[2].get<std::vector<int64_t>>()};
  }
  return catalog;
}

/// Returns the description of this rank's dict. Throws DisagreementError unless all ranks have the same description.
Catalog agreed(const Communicator& world, std::string_view failure, const std::function<Catalog()>& describe) {
  Catalog catalog;
  all_or_none(world, kStateDict, failure, [&] { catalog = describe(); });
  if (same_on_all(world, checksum_value(to_text(catalog)), kStateDict)) return catalog;
  throw DisagreementError(
      "ranks load state dicts that have different names, dtypes or shapes, this one {} tensors; give all ranks the same, or "
      "that of rank 0 to all of them (broadcast_from_rank0). Nothing was changed",
      catalog.tensors.size());
}

/// Throws DisagreementError unless all ranks have the same values: each loads its part of its own dict, so they would mix in silence.
void expect_same_values(const Communicator& world, const StateDict& dict, std::string_view failure) {
  std::string sums;  // in the order of names, which the ranks have in common by now
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
      "ranks load state dicts with other values of '{}'{}; give all ranks the same, or that of rank 0 to all of them "
      "(broadcast_from_rank0). Nothing was changed",
      names.front(), names.size() > 1 ? fmt::format(" and {} more", names.size() - 1) : "");
}

class DictSource : public ValueSource {
 public:
  explicit DictSource(Catalog catalog) : catalog_(std::move(catalog)) {}
  const Catalog& catalog() const override { return catalog_; }

 private:
  const Catalog catalog_;
};

/// Whether two tensors have the same dtype, shape and bits.
bool are_same(const at::Tensor& one, const at::Tensor& other) {
  if (one.is_same(other)) return true;
  if (one.scalar_type() != other.scalar_type() || one.sizes() != other.sizes()) return false;
  const auto bytes = [](const at::Tensor& tensor) { return tensor.detach().contiguous().view({-1}).view(at::kByte); };
  return at::equal(bytes(one), bytes(other).to(one.device()));
}

/// Copies the slices of a whole tensor.
void read_slices(const at::Tensor& whole, const PartRecord& part, const at::Tensor& values) {
  const auto views = views_of_slices(values, part.slices, part.strides);
  for (size_t i = 0; i < views.size(); i++) at::Tensor(views[i]).copy_(view_of(whole, part.slices[i]));
}

class OwnDict : public DictSource {
 public:
  OwnDict(Catalog catalog, const StateDict& dict) : DictSource(std::move(catalog)), dict_(dict) {}
  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> /*parts*/) const override {
    return are_same(dict_.at(one), dict_.at(other));
  }
  void expect_parts(const std::string& /*name*/, std::span<const PartRecord> /*parts*/) const override {}
  void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int /*rank*/) const override {
    read_slices(dict_.at(name).detach(), part, values);
  }

 private:
  const StateDict& dict_;
};

class DictOfRank0 : public DictSource {
 public:
  DictOfRank0(Catalog catalog, const StateDict& dict, Communicator world)
      : DictSource(std::move(catalog)), dict_(dict), world_(std::move(world)) {}
  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> /*parts*/) const override {
    return !world_.is_first() || are_same(dict_.at(one), dict_.at(other));
  }
  void expect_parts(const std::string& /*name*/, std::span<const PartRecord> /*parts*/) const override {}
  void open(const std::string& name) override {
    opened_ = at::Tensor();  // before there is memory for the next
    const auto& info = catalog().tensors.at(name);
    const auto device = world_.traits().device;
    opened_ = world_.is_first() ? dict_.at(name).detach().to(device).contiguous()
                                : at::empty(info.shape, at::TensorOptions(device).dtype(info.dtype));
    if (opened_.numel() > 0) world_.broadcast(opened_, 0, kStateDict).wait();
  }
  void read(const std::string& /*name*/, const PartRecord& part, const at::Tensor& values, int /*rank*/) const override {
    read_slices(opened_, part, values);
  }

 private:
  const StateDict& dict_;
  const Communicator world_;
  at::Tensor opened_;
};

class OwnSlices : public DictSource {
 public:
  OwnSlices(Catalog catalog, const ShardedStateDict& dict) : DictSource(std::move(catalog)), dict_(dict) {}

  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> /*parts*/) const override {
    const auto &first = dict_.at(one), &second = dict_.at(other);
    return first.slices == second.slices && std::ranges::equal(first.values, second.values, are_same);
  }
  void expect_parts(const std::string& name, std::span<const PartRecord> parts) const override {
    for (const auto& part : parts) {
      for (const auto& slice : part.slices) expect_covered(name, slice);
    }
  }
  void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int /*rank*/) const override {
    const auto& there = dict_.at(name);
    const auto views = views_of_slices(values, part.slices, part.strides);
    for (size_t i = 0; i < views.size(); i++) {
      for (size_t k = 0; k < there.slices.size(); k++) {
        const auto both = intersection(part.slices[i], there.slices[k]);
        if (both) inside(views[i], part.slices[i], *both).copy_(inside(there.values[k].detach(), there.slices[k], *both));
      }
    }
  }

 private:
  /// The values of `box` in a tensor with the values of `of`, a box around it.
  static at::Tensor inside(at::Tensor values, const TensorSlice& of, const TensorSlice& box) {
    for (size_t d = 0; d < box.sizes.size(); d++) {
      values = values.narrow(static_cast<int64_t>(d), box.offsets[d] - of.offsets[d], box.sizes[d]);
    }
    return values;
  }

  void expect_covered(const std::string& name, const TensorSlice& slice) const {
    std::vector<TensorSlice> left;
    if (slice.numel() > 0) left.push_back(slice);
    for (const auto& there : dict_.at(name).slices) {
      std::vector<TensorSlice> rest;
      for (const auto& each : left) {
        for (auto& piece : difference(each, there)) rest.push_back(std::move(piece));
      }
      left = std::move(rest);
    }
    if (left.empty()) return;
    throw UsageError(
        "the sharded state dict lacks the values {} of '{}', which this rank has; load it on the ranks that it is from, sharded as "
        "they were, or load a full state dict",
        to_string(left.front()), name);
  }

  const ShardedStateDict& dict_;
};

class OwnShards : public DictSource {
 public:
  OwnShards(Catalog catalog, const LocalStateDict& dict) : DictSource(std::move(catalog)), dict_(dict) {}

  bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> /*parts*/) const override {
    const auto &first = dict_.at(one), &second = dict_.at(other);
    return first.slices == second.slices && first.strides == second.strides && are_same(first.values, second.values);
  }
  void expect_parts(const std::string& name, std::span<const PartRecord> parts) const override {
    const auto& there = dict_.at(name);
    for (const auto& part : parts) {
      if (part.slices == there.slices && (part.numel() == 0 || part.strides == there.strides)) continue;
      std::vector<std::string> theirs, ours;
      for (const auto& slice : there.slices) theirs.push_back(to_string(slice));
      for (const auto& slice : part.slices) ours.push_back(to_string(slice));
      throw UsageError(
          "the local state dict is of another layout: it has {} of '{}', strides [{}], and this rank {}, strides [{}]; load it on "
          "the ranks that it is from, sharded as they were, or load a full state dict",
          theirs.empty() ? "nothing" : joined(theirs, " and "), name, joined(there.strides),
          ours.empty() ? "nothing" : joined(ours, " and "), joined(part.strides));
    }
  }
  void read(const std::string& name, const PartRecord& /*part*/, const at::Tensor& values, int /*rank*/) const override {
    at::Tensor(values).copy_(dict_.at(name).values.detach());
  }

 private:
  const LocalStateDict& dict_;
};

}  // namespace

Communicator world_for(const torch::nn::Module& model, DictOf whose) {
  const auto world = world_of(model);
  if (!world && whose == DictOf::Rank0) {
    throw UsageError(
        "broadcast_from_rank0: the model is not sharded, so it does not know of other ranks; shard it first, or give each rank the dict");
  }
  return world ? *world : self_world();
}

void expect_one_rank(const Communicator& world) {
  if (world.local_ranks().size() == 1) return;
  throw UsageError(
      "this process stands for {} ranks, which have no sharded or local state dict in common; use full_state_dict, or "
      "checkpoint::save",
      world.local_ranks().size());
}

std::unique_ptr<ValueSource> source_of(const StateDict& dict, DictOf whose, const Communicator& world, std::string_view failure) {
  const bool all_here = std::ssize(world.local_ranks()) == world.size();
  if (whose == DictOf::EachRank || all_here) {
    auto catalog = agreed(world, failure, [&] { return described(dict); });
    if (!all_here) expect_same_values(world, dict, failure);
    return std::make_unique<OwnDict>(std::move(catalog), dict);
  }
  std::string text;
  all_or_none(world, kStateDict, failure, [&] {
    if (world.is_first()) text = to_text(described(dict));
  });
  return std::make_unique<DictOfRank0>(catalog_of_text(world.texts(text, kStateDict).front()), dict, world);
}

std::unique_ptr<ValueSource> source_of(const ShardedStateDict& dict, const Communicator& world, std::string_view failure) {
  return std::make_unique<OwnSlices>(agreed(world, failure, [&] { return described(dict); }), dict);
}

std::unique_ptr<ValueSource> source_of(const LocalStateDict& dict, const Communicator& world, std::string_view failure) {
  return std::make_unique<OwnShards>(agreed(world, failure, [&] { return described(dict); }), dict);
}

}  // namespace tessera::checkpoint
