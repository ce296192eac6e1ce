#include "tessera/checkpoint/base.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/checkpoint/adapters.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/checkpoint/live/part_records.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/access/local_values.h"
#include "tessera/shard/weight_forms.h"

namespace tessera::checkpoint {
namespace {

uint64_t hash_of(const std::string& name, const at::Tensor& values) {
  const auto here = values.cpu().contiguous();
  Checksum checksum;
  checksum.add(std::as_bytes(std::span(name)));
  checksum.add({static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()});
  return checksum.value();
}

/// Returns the frozen parameters without those of adapters: inactive adapters are frozen, too, but are not a part of the base.
std::set<std::string> names_of_base(ConstModuleRef model, const LocalValues& values) {
  auto names = values.frozen;
  for (const auto& name : adapters().parameters(model)) names.erase(name);
  return names;
}

/// Returns a checksum of the frozen values that this process holds. Gathers nothing, so only the speed of memory limits it.
uint64_t checksum_of_own(ConstModuleRef model, const LocalValues& values, const std::set<std::string>& frozen) {
  const auto world = world_of(*model).value_or(self_world());
  uint64_t sum = 0;
  for (const auto& part : values.parts) {
    if (!frozen.contains(part.name)) continue;
    for (const auto& own : values_of_ranks(part.values, records_of(part), world)) sum += hash_of(part.name, own);
  }
  for (const auto& [name, tensor] : values.outside) {
    if (frozen.contains(name)) sum += hash_of(name, tensor);
  }
  return sum;
}

}  // namespace

void expect_unchanged(ConstModuleRef model, const Base& base) {
  const BelowPaging below;
  if (checksum_of_own(model, local_values(*model), base.parameters) == base.own) return;
  throw UsageError(
      "a frozen value of the model has changed since checkpoint::base_of(model, \"{}\"), or was sharded since, so a checkpoint that refers "
      "to this base would belong to other weights; call base_of when the weights are loaded and sharded, and do not change them afterwards "
      "(merging and unmerging adapters changes them, too)",
      base.name);
}

Base base_of(ConstModuleRef model, std::string name) {
  if (name.empty()) throw UsageError("base_of: a base needs a name, by which people find it");
  const BelowPaging below;
  const auto values = local_values(*model);
  expect_values(values, "the checksum of a base");
  if (const auto world = world_of(*model)) expect_all_on_each(values, *world, "the checksum of a base");
  auto frozen = names_of_base(model, values);
  if (frozen.empty())
    throw UsageError("the model has no base: nothing in it is frozen; freeze the parameters that do not train, or save without a base");
  uint64_t sum = 0;  // a sum, because tensors are not gathered in a fixed order
  gather_like(
      values, [&](const LocalPart& part) { return frozen.contains(part.name) ? part.values : at::Tensor(); },
      [&](const LocalPart& part, const at::Tensor& whole) { sum += hash_of(part.name, whole); });
  for (const auto& [key, tensor] : values.outside) {
    if (frozen.contains(key)) sum += hash_of(key, tensor);
  }
  std::set<std::string> forms;
  for (const auto& [key, form] : values.forms) forms.insert(form->name);
  const auto own = checksum_of_own(model, values, frozen);
  return {.name = std::move(name),
          .checksum = Checksum::text(sum),
          .forms = fmt::format("{}", fmt::join(forms, ", ")),
          .parameters = std::move(frozen),
          .own = own};
}

}  // namespace tessera::checkpoint
