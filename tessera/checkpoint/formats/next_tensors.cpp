#include "tessera/checkpoint/formats/next_tensors.h"

#include <ATen/ATen.h>

#include "tessera/base/error.h"

namespace tessera::checkpoint {

const SafetensorsEntry& NextTensors::next() const {
  if (next_ == entries_.size()) throw UsageError("{} has all its {} tensors already", file_, entries_.size());
  return entries_[next_];
}

void NextTensors::expect_whole(const at::Tensor& tensor) const {
  const auto& entry = next();
  if (tensor.scalar_type() == entry.dtype && tensor.sizes() == at::IntArrayRef(entry.sizes)) return;
  throw UsageError("the next tensor of {} is '{}', {} of [{}], but was given {} of [{}]", file_, entry.name, c10::toString(entry.dtype),
                   joined(entry.sizes), c10::toString(tensor.scalar_type()), joined(tensor.sizes()));
}

NextTensors::Taken NextTensors::take(const at::Tensor& values) {
  const auto& entry = next();
  const auto numel = c10::multiply_integers(entry.sizes);
  if (values.scalar_type() != entry.dtype || values.numel() > numel - written_) {
    throw UsageError("'{}' in {} lacks {} values of {}, but was given {} of {}", entry.name, file_, numel - written_,
                     c10::toString(entry.dtype), values.numel(), c10::toString(values.scalar_type()));
  }
  Taken taken{
      .values = values.detach().cpu().resolve_conj().resolve_neg().contiguous(), .number = next_, .begins = written_ == 0, .ends = false};
  written_ += values.numel();
  if (written_ < numel) return taken;
  taken.ends = true;
  next_++;
  written_ = 0;
  return taken;
}

std::span<const SafetensorsEntry> NextTensors::take_rest() {
  const auto rest = std::span<const SafetensorsEntry>(entries_).subspan(next_);
  next_ = entries_.size();
  return rest;
}

void NextTensors::expect_none() const {
  if (next_ == entries_.size()) return;
  throw UsageError("{} was closed after {} of {} tensors; '{}' is missing", file_, next_, entries_.size(), entries_[next_].name);
}

}  // namespace tessera::checkpoint
