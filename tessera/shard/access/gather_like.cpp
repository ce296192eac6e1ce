#include "tessera/shard/access/gather_like.h"

#include <ATen/ATen.h>

#include "tessera/shard/schedule/gathered.h"

namespace tessera {

void gather_like(const LocalValues& model, c10::function_ref<at::Tensor(const LocalPart& part)> own,
                 c10::function_ref<void(const LocalPart& part, const at::Tensor& whole)> visit) {
  auto first = model.parts.begin();  // they are in the order of the units and their parameters
  for (const auto& unit : model.units) {
    for (const auto& group : unit->groups()) {
      at::Tensor flat;
      std::vector<bool> has;
      for (size_t i = 0; i < group.parameters.size(); i++) {
        const auto values = own(first[static_cast<std::ptrdiff_t>(i)]);
        has.push_back(values.defined());
        if (!values.defined()) continue;
        if (!flat.defined()) flat = at::zeros({group.chunk}, values.options());
        const auto& span = group.parameters[i].span;
        flat.narrow(0, span.shard_offset, span.shard_numel).copy_(values);
      }
      const auto all = flat.defined() ? gathered(*unit, group, flat) : at::Tensor();
      for (size_t i = 0; i < group.parameters.size(); i++, first++) {
        if (has[i]) visit(*first, unsharded_view(all, group.parameters[i]));
      }
    }
  }
}

}  // namespace tessera
