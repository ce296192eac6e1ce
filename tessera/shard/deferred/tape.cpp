#include "tessera/shard/deferred/tape.h"

#include <ATen/ATen.h>
#include <ATen/Context.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "tessera/base/paging_key.h"

namespace tessera {
namespace {

enum class Distribution { Other, Uniform, Normal };

/// The distributions of which any part can be drawn.
Distribution distribution_of(const TapeRecord& record) {
  const auto& name = record.handle.schema().name();
  if (!at::isFloatingType(record.operands.front().dtype)) return Distribution::Other;
  return name == "aten::uniform_" ? Distribution::Uniform : name == "aten::normal_" ? Distribution::Normal : Distribution::Other;
}

bool is_keyed(const TapeRecord& record) {
  return record.draw && !record.draw->state.defined();
}

at::Tensor element_of(const c10::IValue& value, size_t element) {
  return value.isTensor() ? value.toTensor() : value.toListRef()[element].toTensor();
}

/// Returns a result in the layout that it had on the meta device, because later records read its storage in that layout.
at::Tensor laid_out(const at::Tensor& made, const TapeTensor& expected) {
  if (made.sizes() == at::IntArrayRef(expected.sizes) && made.strides() == at::IntArrayRef(expected.strides) &&
      made.storage_offset() == expected.offset)
    return made;
  return at::empty_strided(expected.sizes, expected.strides, made.options()).copy_(made);
}

}  // namespace

TapeTensor::TapeTensor(const at::Tensor& tensor, size_t number, size_t bytes, c10::Device device)
    : number(number),
      bytes(bytes),
      device(device),
      dtype(tensor.scalar_type()),
      sizes(tensor.sizes().vec()),
      strides(tensor.strides().vec()),
      offset(tensor.storage_offset()),
      conjugated(tensor.is_conj()),
      negated(tensor.is_neg()) {}

bool TapeTensor::is_all() const {
  // Checks that the dimensions are dense: sorted by stride, each stride is the product of the sizes before it.
  std::vector<std::pair<int64_t, int64_t>> dims;
  for (size_t i = 0; i < sizes.size(); i++) {
    if (sizes[i] != 1) dims.emplace_back(strides[i], sizes[i]);
  }
  std::ranges::sort(dims);
  int64_t numel = 1;
  for (const auto& [stride, size] : dims) {
    if (stride != numel) return false;
    numel *= size;
  }
  return offset == 0 && static_cast<size_t>(numel) * c10::elementSize(dtype) == bytes && !conjugated && !negated;
}

/// Runs records in memory of its own: on whole tensors, or on the same range of values of all tensors.
class Tape::Replay {
 public:
  explicit Replay(std::optional<ValueRange> range = {}) : range_(range) {}

  at::Tensor tensor(const TapeTensor& wanted) {
    auto& storage = storages_[wanted.number];
    const auto options = at::TensorOptions(wanted.device).dtype(wanted.dtype);
    if (!storage) {
      storage = range_ ? at::empty({range_->numel}, options).storage()
                       : at::empty({static_cast<int64_t>(wanted.bytes)}, options.dtype(at::kByte)).storage();
    }
    if (range_) return at::empty({0}, options).set_(storage, 0, {range_->numel}, {1});
    auto result = at::empty({0}, options).set_(storage, wanted.offset, wanted.sizes, wanted.strides);
    result.unsafeGetTensorImpl()->_set_conj(wanted.conjugated);
    result.unsafeGetTensorImpl()->_set_neg(wanted.negated);
    return result;
  }

  void run(const TapeRecord& record) {
    if (is_keyed(record) && distribution_of(record) != Distribution::Other) return draw(record);
    auto stack = record.arguments;
    for (const auto& operand : record.operands) put_operand(stack[operand.argument], operand.element, tensor(operand));
    if (record.draw) stack[record.draw->argument] = generator_for(record);
    record.handle.callBoxed(&stack);
    for (const auto& result : record.results) {
      const auto made = element_of(stack[result.argument], result.element);
      storages_[result.number] = (range_ ? made : laid_out(made, result)).storage();
    }
  }

  void drop(size_t number) { storages_.erase(number); }

 private:
  void draw(const TapeRecord& record) {
    const auto& wanted = record.operands.front();
    const auto target = tensor(wanted);
    const bool in_place = range_ || wanted.is_all();
    const auto values = !in_place ? at::empty({target.numel()}, target.options()) : target.as_strided({target.numel()}, {1}, 0);
    const auto number = [&](size_t i) { return record.arguments[i].toDouble(); };
    const auto begin = range_ ? range_->begin : 0;
    if (distribution_of(record) == Distribution::Uniform) {
      draw_uniform(values, number(1), number(2), record.draw->key, begin);
    } else {
      draw_normal(values, number(1), number(2), record.draw->key, begin);
    }
    if (!in_place) target.copy_(values.view(target.sizes()));
  }

  static at::Generator generator_for(const TapeRecord& record) {
    const auto& given = record.arguments[record.draw->argument];
    const auto device = record.operands.front().device;
    auto generator = (given.isNone() ? at::globalContext().defaultGenerator(device) : given.toGenerator()).clone();
    if (record.draw->state.defined()) {
      generator.set_state(record.draw->state);
    } else {
      generator.set_current_seed(record.draw->key);
    }
    return generator;
  }

  const std::optional<ValueRange> range_;
  std::map<size_t, c10::Storage> storages_;
};

size_t Tape::new_number() {
  writers_.emplace_back();
  readers_.emplace_back();
  open_.push_back(true);
  return writers_.size() - 1;
}

void Tape::close(size_t number) {
  if (!open_[number]) return;
  open_[number] = false;
  for (const auto index : records_for(number)) {
    if (is_needed(index)) continue;
    records_[index].arguments.clear();
    records_[index].draw.reset();
  }
}

bool Tape::is_needed(size_t record) const {
  std::set<size_t> seen;
  std::vector<size_t> next = {record};
  while (!next.empty()) {
    const auto index = next.back();
    next.pop_back();
    for (const auto number : records_[index].written) {
      if (open_[number]) return true;
      for (const auto reader : readers_[number]) {
        if (reader > index && seen.insert(reader).second) next.push_back(reader);
      }
    }
  }
  return false;
}

void Tape::append(TapeRecord record) {
  if (is_keyed(record)) record.draw->key = next_key();
  for (const auto number : record.written) writers_[number].push_back(records_.size());
  for (const auto& operand : record.operands) readers_[operand.number].push_back(records_.size());
  records_.push_back(std::move(record));
}

std::set<size_t> Tape::records_for(size_t number) const {
  std::set<size_t> taken;
  std::map<size_t, size_t> looked_up;  // for each number, the record up to which its writers have been taken
  std::vector<std::pair<size_t, size_t>> open = {{number, records_.size()}};
  while (!open.empty()) {
    const auto [next, before] = open.back();
    open.pop_back();
    auto& known = looked_up[next];
    for (const auto index : writers_[next]) {
      if (index < known || index >= before || !taken.insert(index).second) continue;
      for (const auto& operand : records_[index].operands) open.emplace_back(operand.number, index);
    }
    known = std::max(known, before);
  }
  return taken;
}

void Tape::name(size_t number, const std::string& name) {
  if (!seed_) return;
  for (const auto index : records_for(number)) {
    auto& record = records_[index];
    if (!is_keyed(record) || std::exchange(record.draw->has_final_key, true)) continue;
    record.draw->key = key_of(*seed_, name, draws_[name]++);
  }
}

at::Tensor Tape::replay(const TapeTensor& wanted) const {
  const BelowPaging below;
  const auto taken = records_for(wanted.number);
  std::map<size_t, size_t> last_use;
  for (const auto index : taken) {
    for (const auto& operand : records_[index].operands) last_use[operand.number] = index;
    for (const auto& result : records_[index].results) last_use[result.number] = index;
  }
  last_use.erase(wanted.number);
  Replay replay;
  for (const auto index : taken) {
    const auto& record = records_[index];
    replay.run(record);
    if (record.draw) record.draw->has_final_key = true;
    for (const auto* used : {&record.operands, &record.results}) {
      for (const auto& tensor : *used) {
        if (const auto last = last_use.find(tensor.number); last != last_use.end() && last->second == index) replay.drop(tensor.number);
      }
    }
  }
  return replay.tensor(wanted);
}

bool Tape::has_parts(const TapeTensor& wanted) const {
  const auto is_like = [&](const TapeTensor& tensor) {
    return tensor.is_all() && tensor.sizes == wanted.sizes && tensor.strides == wanted.strides;
  };
  if (!is_like(wanted)) return false;
  return std::ranges::all_of(records_for(wanted.number), [&](size_t index) {
    const auto& record = records_[index];
    if (!std::ranges::all_of(record.operands, is_like) || !std::ranges::all_of(record.results, is_like)) return false;
    if (is_keyed(record) && distribution_of(record) != Distribution::Other) return true;
    if (record.draw || !facts_of(record.handle).elementwise) return false;
    bool scalars = true;
    for_each_operand(record.arguments, 0,
                     [&](size_t, size_t, const at::Tensor& tensor) { scalars = scalars && tensor.numel() == 1 && tensor.dim() <= 1; });
    return scalars;
  });
}

at::Tensor Tape::replay(const TapeTensor& wanted, const ValueRange& range) const {
  const BelowPaging below;
  Replay replay(range);
  for (const auto index : records_for(wanted.number)) replay.run(records_[index]);
  return replay.tensor(wanted);
}

uint64_t Tape::fingerprint(const TapeTensor& wanted) const {
  uint64_t hash = 0;
  const auto add = [&](uint64_t value) { hash = (hash ^ value) * 0x100000001b3ULL + 1; };
  for (const auto size : wanted.sizes) add(static_cast<uint64_t>(size));
  for (const auto index : records_for(wanted.number)) {
    const auto& record = records_[index];
    for (const auto character : record.handle.schema().name()) add(static_cast<unsigned char>(character));
    if (record.draw) add(record.draw->key);
    for (const auto& value : record.arguments) {
      if (value.isDouble()) add(std::hash<double>()(value.toDouble()));
      if (value.isInt()) add(static_cast<uint64_t>(value.toInt()));
      if (value.isTensor() && value.toTensor().defined()) add(std::hash<double>()(value.toTensor().to(at::kDouble).sum().item<double>()));
    }
  }
  return hash;
}

}  // namespace tessera
