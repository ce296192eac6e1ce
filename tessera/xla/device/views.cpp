#include "tessera/xla/device/views.h"

#include <ATen/core/LegacyTypeDispatch.h>

#include <algorithm>
#include <numeric>
#include <string_view>

#include "tessera/base/error.h"
#include "tessera/xla/device/storage.h"
#include "tessera/xla/graph/arithmetic.h"
#include "tessera/xla/graph/overwriting.h"

namespace tessera::xla {
namespace {

/// Describes a view as a box in its storage: `shape` is the storage reshaped to one dimension for each stride of the view, and the view is
/// its part at `start` with `sizes`. A transpose and a broadcast give this part the view's own shape.
struct Box {
  bool fits = true;    // whether the view is such a box; otherwise, places_of() lists its elements
  bool whole = false;  // whether the box is the whole storage
  int64_t padded = 0;  // the number of elements in `shape`; the storage may have fewer
  Sizes shape, start, sizes;
  Sizes dimensions;  // the view's dimensions with more than one place, from the widest stride to the narrowest
};

Box box_of(const at::Tensor& view) {
  Box box;
  const auto elements = elements_of_storage(view);
  for (int64_t i = 0; i < view.dim(); i++) {
    if (view.size(i) > 1 && view.stride(i) > 0) box.dimensions.push_back(i);
  }
  std::ranges::stable_sort(box.dimensions, std::ranges::greater{}, [&](int64_t i) { return view.stride(i); });
  Sizes strides;
  int64_t dense = 1;
  bool is_dense = true;
  for (const auto i : box.dimensions) {
    strides.push_back(view.stride(i));
    box.sizes.push_back(view.size(i));
  }
  for (size_t i = strides.size(); i-- > 0;) {
    is_dense &= strides[i] == dense;
    dense *= box.sizes[i];
  }
  auto offset = view.storage_offset();
  if (is_dense) {
    box.whole = dense == elements;
    if (!box.whole) {
      box.shape = {elements};
      box.start = {offset};
      box.sizes = {dense};
    }
    box.padded = elements;
    return box;
  }
  if (strides.back() != 1) {
    strides.push_back(1);
    box.sizes.push_back(1);
  }
  const auto rows = (elements + strides[0] - 1) / strides[0];
  box.padded = rows * strides[0];
  for (size_t i = 0; i < strides.size(); i++) {
    if (i > 0 && strides[i - 1] % strides[i]) box.fits = false;
    box.shape.push_back(i == 0 ? rows : strides[i - 1] / strides[i]);
    box.start.push_back(offset / strides[i]);
    offset %= strides[i];
    if (box.start.back() + box.sizes[i] > box.shape.back()) box.fits = false;
  }
  return box;
}

/// Returns the position of each of the view's elements in the storage, as a list.
Value places_of(const at::Tensor& view) {
  const Type type{at::kLong, view.sizes().vec()};
  auto places = hlo::filled(view.storage_offset(), type);
  for (int64_t i = 0; i < view.dim(); i++) {
    if (view.size(i) == 1 || view.stride(i) == 0) continue;
    const auto stride = hlo::filled(view.stride(i), type);
    places = binary("add", places, binary("multiply", hlo::iota(type, i), stride));
  }
  return reshape(places, {view.numel()});
}

Sizes sizes_of(const at::Tensor& view, const Sizes& dimensions) {
  Sizes sizes;
  for (const auto i : dimensions) sizes.push_back(view.size(i));
  return sizes;
}

/// The permutation from the order of the box's dimensions to that of the view.
Sizes to_view_order(const Sizes& dimensions) {
  Sizes order(dimensions.size());
  std::iota(order.begin(), order.end(), 0);
  std::ranges::sort(order, {}, [&](int64_t i) { return dimensions[static_cast<size_t>(i)]; });
  return order;
}

Value list_of(const Value& value, int64_t elements) {
  return reshape(value, {elements});
}

/// Returns the storage's elements in the box's shape, with zeros after the last element if the storage has too few.
Value shaped(const Value& value, const Box& box, int64_t elements) {
  auto list = list_of(value, elements);
  if (box.padded != elements) list = pad(list, hlo::constant(0, list.element()), {0}, {box.padded - elements}, {0});
  return reshape(list, box.shape);
}

bool is_all_of_storage(const at::Tensor& tensor) {
  return tensor.numel() == elements_of_storage(tensor) && tensor.is_contiguous();
}

Value number_of(const at::Tensor& tensor) {
  if (tensor.numel() != 1) {
    throw UsageError("an operator of an XLA device got a tensor on {} with {} elements: move it to the device first", tensor.device().str(),
                     tensor.numel());
  }
  const auto number = tensor.is_floating_point() ? hlo::scalar(tensor.item().toDouble(), tensor.scalar_type())
                                                 : hlo::constant(tensor.item().toLong(), tensor.scalar_type());
  return reshape(number, tensor.sizes());
}

Value in_memory(const at::Tensor& tensor) {
  const auto lock = lock_device();
  const auto& cell = cell_of(tensor);
  if (tensor.numel() == 0 || !cell.value) {  // unwritten memory may hold anything; here it holds zeros
    return hlo::filled(0, {tensor.scalar_type(), tensor.sizes().vec()});
  }
  auto value = in_type(cell.value, tensor.scalar_type());
  if (is_all_of_storage(tensor)) return reshape(value, tensor.sizes());
  const auto elements = elements_of_storage(tensor);
  const auto box = box_of(tensor);
  if (!box.fits) return reshape(take(list_of(value, elements), places_of(tensor), 0), tensor.sizes());
  if (!box.whole) {
    Sizes limit = box.start;
    for (size_t i = 0; i < limit.size(); i++) limit[i] += box.sizes[i];
    value = slice(shaped(value, box, elements), box.start, limit, Sizes(limit.size(), 1));
  }
  value = transpose(reshape(value, sizes_of(tensor, box.dimensions)), to_view_order(box.dimensions));
  auto dimensions = box.dimensions;
  std::ranges::sort(dimensions);
  return broadcast(value, tensor.sizes(), dimensions);
}

/// Whether all elements are known to be one number, whatever that number is.
bool is_one_number(const Value& value) {
  if (value.rank() == 0) return true;
  const auto& node = value.node();
  const std::string_view name = node.name;
  return node.kind == Node::Kind::Operation && (name == "broadcast_in_dim" || name == "convert" || name == "reshape") &&
         is_one_number(node.operands[0]);
}

/// Whether several of the view's elements are one element of the storage.
bool overlaps_itself(const at::Tensor& view) {
  Sizes dimensions;
  for (int64_t i = 0; i < view.dim(); i++) {
    if (view.size(i) > 1) dimensions.push_back(i);
  }
  std::ranges::sort(dimensions, {}, [&](int64_t i) { return view.stride(i); });
  int64_t reach = 0;  // the largest distance between elements along the dimensions with smaller strides
  bool is_clear = true;
  for (const auto i : dimensions) {
    is_clear &= view.stride(i) > reach;
    reach += (view.size(i) - 1) * view.stride(i);
  }
  if (is_clear) return false;
  std::vector<bool> taken(static_cast<size_t>(reach) + 1);
  Sizes at(dimensions.size(), 0);
  int64_t place = 0;
  for (int64_t left = view.numel(); left > 0; left--) {
    if (taken[static_cast<size_t>(place)]) return true;
    taken[static_cast<size_t>(place)] = true;
    for (size_t d = 0; d < at.size(); d++) {
      const auto stride = view.stride(dimensions[d]), size = view.size(dimensions[d]);
      place += stride;
      if (++at[d] < size) break;
      place -= size * stride;
      at[d] = 0;
    }
  }
  return false;
}

/// Returns the sizes, with 1 for each dimension along which `expand` repeats elements.
Sizes sizes_once(const at::Tensor& tensor) {
  auto sizes = tensor.sizes().vec();
  for (size_t i = 0; i < sizes.size(); i++) {
    if (tensor.stride(static_cast<int64_t>(i)) == 0) sizes[i] = std::min<int64_t>(sizes[i], 1);
  }
  return sizes;
}

/// Applies the tensor's conjugate and negative bits, in reads and in writes alike: applying them a second time undoes the first.
Value as_marked(const Value& value, const at::Tensor& tensor) {
  const auto conjugated = tensor.is_conj() ? conjugate(value) : value;
  return tensor.is_neg() ? unary("negate", conjugated) : conjugated;
}

}  // namespace

Value in_type(const Value& value, at::ScalarType element) {
  return value.element() == element ? value : bitcast(flat(value), element);
}

Value read(const at::Tensor& tensor) {
  return is_xla(tensor) ? as_marked(in_memory(tensor), tensor) : number_of(tensor);
}

void write(const at::Tensor& tensor, Value value) {
  const auto lock = lock_device();
  auto& cell = cell_of(tensor);
  value = as_marked(convert(value, tensor.scalar_type()), tensor);
  if (tensor.numel() == 0) return;
  if (is_all_of_storage(tensor)) {
    cell.value = std::move(value);
    return;
  }
  if (const auto sizes = sizes_once(tensor); tensor.sizes() != sizes) {
    if (!is_one_number(value)) throw UsageError("an expanded tensor can't be written, because several of its elements share memory: write to its clone()");
    const at::AutoDispatchBelowADInplaceOrView below;
    return write(tensor.as_strided(sizes, tensor.strides()), slice(value, Sizes(sizes.size(), 0), sizes, Sizes(sizes.size(), 1)));
  }
  const auto elements = elements_of_storage(tensor);
  const auto base = [&] {
    return cell.value ? in_type(cell.value, tensor.scalar_type()) : hlo::filled(0, {tensor.scalar_type(), {elements}});
  };
  const auto box = box_of(tensor);
  if (!box.fits) {
    if (!is_one_number(value) && overlaps_itself(tensor)) {
      throw UsageError(
          "a tensor of sizes {} and strides {} can't be written, because its windows overlap, so that the result would depend on the order "
          "of writing: write to its clone(), or to the windows one by one",
          c10::str(tensor.sizes()), c10::str(tensor.strides()));
    }
    cell.value = put(list_of(base(), elements), places_of(tensor), reshape(value, {tensor.numel()}), Combine::Second);
    return;
  }
  if (!box.whole && cell.value && Overwriting(cell.value, in_memory(tensor)).reads_other_places(value))
    value = barrier(std::span(&value, 1))[0];
  auto dimensions = box.dimensions;
  std::ranges::sort(dimensions);
  value = transpose(reshape(value, sizes_of(tensor, dimensions)), hlo::inverse(to_view_order(box.dimensions)));
  if (!box.whole) {
    std::vector<Value> start;
    for (const auto at : box.start) start.push_back(hlo::constant(at, at::kLong));
    value = dynamic_update_slice(shaped(base(), box, elements), reshape(value, box.sizes), start);
    if (box.padded != elements) value = slice(list_of(value, box.padded), 0, 0, elements);
  }
  cell.value = list_of(value, elements);
}

}  // namespace tessera::xla
