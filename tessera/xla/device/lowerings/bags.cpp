// Embedding bags: sums, means and maxima of the embedding rows that the indices of each bag name.
#include <ATen/ATen.h>

#include "tessera/xla/device/kernels.h"
#include "tessera/xla/device/views.h"

namespace tessera::xla {
namespace {

enum : int64_t { kSumOfBag, kMeanOfBag, kMaxOfBag };

at::Tensor is_counted(const at::Tensor& indices, int64_t padding) {
  return padding >= 0 ? indices.ne(padding) : at::ones_like(indices, at::kBool);
}

void embedding_bag(Call& call) {
  const auto &weight = call.tensor(0), &indices = call.tensor(1);
  auto offsets = call.tensor(2);
  if (call.flag(7)) offsets = offsets.narrow(0, 0, offsets.size(0) - 1);
  const auto mode = call.integer(4), bags = offsets.size(0), count = indices.numel(), width = weight.size(1);
  const auto places = at::arange(count, offsets.options());
  const auto bag = at::searchsorted(offsets, places, false, true) - 1;
  const auto counted = is_counted(indices, call.integer(8)), column = counted.unsqueeze(1);
  const auto rows = weight.index_select(0, indices);
  const auto size = at::zeros({bags}, indices.options()).index_add(0, bag, counted.to(indices.scalar_type()));
  if (mode == kMaxOfBag) {
    const auto nothing = at::full({bags, width}, -std::numeric_limits<double>::infinity(), weight.options());
    const auto largest = nothing.index_reduce(0, bag, at::where(column, rows, nothing.select(0, 0).expand_as(rows)), "amax");
    // Of the rows with the largest value, the first one gets the gradient.
    const auto has = rows.eq(largest.index_select(0, bag)).logical_and(column);
    const auto beyond = at::full({bags, width}, count, indices.options());
    const auto first = beyond.index_reduce(0, bag, at::where(has, places.unsqueeze(1), count).to(indices.scalar_type()), "amin");
    const auto is_empty = size.eq(0).unsqueeze(1);
    const auto word =
        count == 0 ? at::zeros_like(first) : indices.index_select(0, first.clamp_max(count - 1).reshape({-1})).view({bags, width});
    return call.give(
        {read(at::where(is_empty, 0, largest).to(weight.scalar_type())), read(bag), read(size), read(at::where(is_empty, -1, word))});
  }
  auto weighted = call.has(6) ? rows * call.tensor(6).unsqueeze(1) : rows;
  weighted = at::where(column, weighted, 0).to(weight.scalar_type());
  auto sum = at::zeros({bags, width}, weight.options()).index_add(0, bag, weighted);
  if (mode == kMeanOfBag) sum = sum / size.clamp_min(1).unsqueeze(1).to(weight.scalar_type());
  call.give({read(sum), read(bag), read(size), read(mode == kSumOfBag ? at::zeros({0}, indices.options()) : size)});
}

void embedding_bag_gradient(Call& call) {
  const auto &g = call.tensor(0), &indices = call.tensor(1), &bag = call.tensor(3), &size = call.tensor(4), &largest = call.tensor(5);
  if (call.flag(9)) throw NotLowered();  // the gradient would be a sparse tensor
  const auto zeros = at::zeros({call.integer(6), g.size(1)}, g.options());
  if (call.integer(8) == kMaxOfBag) {
    const auto kept = at::where(largest.ge(0), g, 0).to(g.scalar_type());
    return call.give(read(zeros.scatter_add(0, largest.clamp_min(0), kept)));
  }
  auto each = g.index_select(0, bag);
  if (call.integer(8) == kMeanOfBag) each = each / size.clamp_min(1).index_select(0, bag).unsqueeze(1).to(g.scalar_type());
  if (call.has(10)) each = each * call.tensor(10).unsqueeze(1);
  if (call.flag(7)) {
    const auto counts = at::zeros({call.integer(6)}, indices.options()).index_add(0, indices, at::ones_like(indices));
    each = each / counts.index_select(0, indices).unsqueeze(1).to(g.scalar_type());
  }
  call.give(read(zeros.index_add(0, indices, at::where(is_counted(indices, call.integer(11)).unsqueeze(1), each, 0).to(g.scalar_type()))));
}

void weights_of_samples_gradient(Call& call) {
  const auto &g = call.tensor(0), &indices = call.tensor(2), &bag = call.tensor(4);
  const auto each = (g.index_select(0, bag) * call.tensor(1).index_select(0, indices)).sum(1);
  call.give(read(at::where(is_counted(indices, call.integer(6)), each, 0).to(g.scalar_type())));
}

}  // namespace

void register_bags() {
  add_kernels({
      {"_embedding_bag _embedding_bag_forward_only", embedding_bag},
      {"_embedding_bag_backward", embedding_bag_gradient},
      {"_embedding_bag_per_sample_weights_backward", weights_of_samples_gradient},
  });
}

}  // namespace tessera::xla
