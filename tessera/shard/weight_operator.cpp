#include "tessera/shard/weight_operator.h"

#include <utility>

#include "tessera/shard/access/replaced_operator.h"
#include "tessera/shard/paging/paging.h"
#include "tessera/shard/storage/paged_tensor.h"
#include "tessera/shard/unit/parameter_meta.h"

namespace tessera {

void replace_weight_operator(const at::Tensor& weight, WeightOperator instead) {
  install_paging();
  auto& meta = WeightMeta::of(weight);
  meta.instead = instead ? std::make_shared<const WeightOperator>(std::move(instead)) : nullptr;
  // Operators on a weight that is not sharded have to come to paging, too.
  if (!is_paged(weight)) weight.unsafeGetTensorImpl()->shallow_copy_from(paged_alias(weight).getIntrusivePtr());
}

PlainOperators::PlainOperators() : before_(std::exchange(runs_plainly(), true)) {}

PlainOperators::~PlainOperators() {
  runs_plainly() = before_;
}

}  // namespace tessera
