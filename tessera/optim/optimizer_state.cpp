// The part of Optimizer that makes, gives out and loads its state.
#include <ATen/ATen.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/comm/recorded.h"
#include "tessera/comm/simulation.h"
#include "tessera/optim/optimizer.h"
#include "tessera/shard/access/shard_place.h"
#include "tessera/shard/parameters.h"

namespace tessera::optim {
namespace {

constexpr auto kSteps = "step";

at::Tensor zeros_on_disk(const at::Tensor& like, const at::TensorOptions& options, const DiskMemoryOptions& disk) {
  const auto bytes = like.storage().nbytes();
  const c10::Storage storage(c10::Storage::use_byte_size_t(), bytes, allocate_on_disk(bytes, disk, "state of the optimizer"), nullptr,
                             /*resizable=*/false);
  return at::empty({0}, options).set_(storage, 0, like.sizes(), like.strides());
}

}  // namespace

at::Tensor Optimizer::part(const Section& section, const at::Tensor& flat, const Member& member) {
  if (section.members.size() == 1) return flat;
  return flat.narrow(0, member.offset, member.parameter.numel()).view(member.parameter.sizes());
}

void Optimizer::make_state(Section& section) const {
  if (!section.state.empty()) return;
  const c10::impl::ExcludeDispatchKeyGuard below(kPagingKey);  // the parameters need no values for this
  const MemoryScope scope(MemoryKind::Optimizer);
  // TensorOptions do not carry the paging key, so state is not a shard.
  for (const auto& kind : kinds_of(section)) {
    const auto like = section.flat.options().dtype(kind.dtype.value_or(section.flat.scalar_type()));
    const auto zeros = [&](const at::TensorOptions& options) {
      if (kind.block == 1) return at::zeros_like(section.flat, options);
      return at::zeros({(section.flat.numel() + kind.block - 1) / kind.block}, options);
    };
    section.state.push_back(disk_ ? zeros_on_disk(zeros(like.device(at::kMeta)), like, *disk_) : zeros(like));
    if (record_) record_->add_optimizer(this, section.state.back().nbytes());
  }
}

void Optimizer::offload_state(OffloadTo to, const DiskMemoryOptions& disk) {
  for (const auto& group : groups_) {
    for (const auto& section : group.sections) {
      if (!section.state.empty()) throw UsageError("offload_state: the optimizer has state already; call it before the first step");
      const auto place = place_of(section.members.front().parameter);
      if (to == OffloadTo::Host && place && place.is_offloaded()) continue;  // the shard is on the host, and its state with it
      expect_possible(to, "the state of the optimizer", disk, section.flat.device());
    }
  }
  disk_ = to == OffloadTo::Disk ? std::optional(disk) : std::nullopt;
}

Optimizer::Member* Optimizer::find(const at::Tensor& parameter, Section*& section) {
  for (auto& group : groups_) {
    for (auto& candidate : group.sections) {
      for (auto& member : candidate.members) {
        if (!member.parameter.is_same(parameter)) continue;
        section = &candidate;
        return &member;
      }
    }
  }
  return nullptr;
}

std::map<std::string, ParameterState> Optimizer::state(ConstModuleRef model) const {
  std::map<c10::TensorImpl*, std::string> names;
  for (const auto& [name, parameter] : named_parameters(model)) names[parameter.unsafeGetTensorImpl()] = name;
  std::map<std::string, ParameterState> result;
  for (const auto& group : groups_) {
    for (const auto& section : group.sections) {
      for (const auto& member : section.members) {
        if (member.steps == 0) continue;
        const auto name = names.find(member.parameter.unsafeGetTensorImpl());
        if (name == names.end())
          throw UsageError("the optimizer has a parameter that the model does not have; pass the model that the optimizer was made for");
        auto& own = result[name->second];
        const auto kinds = kinds_of(section);
        for (size_t i = 0; i < kinds.size(); i++) own[kinds[i].name] = part(section, section.state[i], member);
        own[kSteps] = at::scalar_tensor(member.steps, at::kLong);
      }
    }
  }
  return result;
}

void Optimizer::expect_state(ConstModuleRef model, const std::map<std::string, ParameterState>& state) {
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(model)) parameters[name] = parameter;
  for (const auto& [name, saved] : state) {
    Section* section = nullptr;
    const auto known = parameters.find(name);
    if (known == parameters.end() || find(known->second, section) == nullptr) {
      throw UsageError("the state is of a parameter '{}', which this optimizer does not have", name);
    }
    const auto kinds = kinds_of(*section);
    const auto* const hint = in_blocks_.empty()
                                 ? "was it saved with other options?"
                                 : "was it saved with other options, or with a layout (tessera_layout) that cuts blocks differently?";
    for (const auto& kind : kinds) {
      const auto tensor = saved.find(kind.name);
      if (tensor == saved.end()) {
        throw UsageError("the state of '{}' has no '{}', which this optimizer needs; {}", name, kind.name, hint);
      }
      const auto expected = (known->second.numel() + kind.block - 1) / kind.block;
      if (tensor->second.numel() != expected || (kind.block == 1 && tensor->second.sizes() != known->second.sizes())) {
        throw UsageError("the state '{}' of '{}' has {} values, but its shard here has {}; it was saved by another number of ranks", kind.name,
                         name, tensor->second.numel(), expected);
      }
    }
    const auto steps = saved.find(kSteps);
    if (steps == saved.end()) throw UsageError("the state of '{}' has no '{}', which this optimizer needs", name, kSteps);
    if (steps->second.numel() != 1 || steps->second.is_meta()) throw UsageError("'{}' of '{}' is not a number", kSteps, name);
    for (const auto& [key, tensor] : saved) {
      if (key == kSteps || std::ranges::any_of(kinds, [&](const StateKind& kind) { return kind.name == key; })) continue;
      throw UsageError("the state of '{}' has a '{}', which this optimizer does not keep; {}", name, key, hint);
    }
  }
}

void Optimizer::load_state(ConstModuleRef model, const std::map<std::string, ParameterState>& state) {
  expect_state(model, state);
  std::map<std::string, at::Tensor> parameters;
  for (const auto& [name, parameter] : named_parameters(model)) parameters[name] = parameter;
  for (auto& group : groups_) {
    for (auto& section : group.sections) {
      for (auto& member : section.members) member.steps = 0;
    }
  }
  for (const auto& [name, saved] : state) {
    Section* section = nullptr;
    auto* member = find(parameters[name], section);
    make_state(*section);
    const auto kinds = kinds_of(*section);
    for (size_t i = 0; i < kinds.size(); i++) {
      if (const auto& values = saved.at(kinds[i].name); !values.is_meta()) part(*section, section->state[i], *member).copy_(values);
    }
    member->steps = saved.at(kSteps).item<int64_t>();
  }
  for (auto& group : groups_) {
    for (auto& section : group.sections) {
      for (const auto& member : section.members) {
        if (member.steps > 0) continue;
        for (const auto& values : section.state) part(section, values, member).zero_();  // left from earlier steps
      }
    }
  }
}

}  // namespace tessera::optim
