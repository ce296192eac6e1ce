#include "tessera/checkpoint/base.h"

#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <span>

#include "tessera/base/error.h"
#include "tessera/base/paging_key.h"
#include "tessera/checkpoint/formats/checksum.h"
#include "tessera/nn/lora.h"
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

/// Of adapters, those that don't act are frozen, too, and yet are no part of the base.
std::set<std::string> names_of_base(ConstModuleRef model, const LocalValues& values) {
  auto names = values.frozen;
  for (const auto& adapter : lora::adapters(model)) {
    for (const auto& layer : lora::layers_of(model, adapter)) {
      for (const auto& [kind, name] : layer.names) names.erase(name);
    }
  }
  return names;
}

}  // namespace

Base base_of(ConstModuleRef model, std::string name) {
  if (name.empty()) throw UsageError("base_of: a base needs a name, by which people find it");
  const BelowPaging below;
  const auto values = local_values(*model);
  expect_values(values, "the checksum of a base");
  if (const auto world = world_of(*model)) expect_all_on_each(values, *world, "the checksum of a base");
  auto frozen = names_of_base(model, values);
  if (frozen.empty()) throw UsageError("the model has no base: nothing in it is frozen");
  uint64_t sum = 0;  // of names in any order
  gather_like(
      values, [&](const LocalPart& part) { return frozen.contains(part.name) ? part.values : at::Tensor(); },
      [&](const LocalPart& part, const at::Tensor& whole) { sum += hash_of(part.name, whole); });
  for (const auto& [key, tensor] : values.outside) {
    if (frozen.contains(key)) sum += hash_of(key, tensor);
  }
  std::set<std::string> forms;
  for (const auto& [key, form] : values.forms) forms.insert(form->name);
  return {.name = std::move(name),
          .checksum = Checksum::text(sum),
          .forms = fmt::format("{}", fmt::join(forms, ", ")),
          .parameters = std::move(frozen)};
}

}  // namespace tessera::checkpoint
