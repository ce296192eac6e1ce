// EarlierGradients: knows gradients again by their tensors and versions.
#include "tessera/shard/gradients/gradient_watch.h"

#include <fmt/format.h>

#include <utility>

#include "tessera/comm/calling.h"
#include "tessera/shard/unit/unit.h"

namespace tessera {

EarlierGradients::Left EarlierGradients::left_in(const at::Tensor& shard) {
  const auto& gradient = shard.grad();
  if (!shard.requires_grad() || !gradient.defined() || gradient.is_inference()) return {};
  return {.gradient = WeakTensor(gradient), .version = gradient._version()};
}

std::string EarlierGradients::note_reduction(const Unit& unit) {
  auto& known = known_[&unit];
  known.has_new = true;
  size_t place = 0, kept = 0;
  uint64_t which = 0;
  for (const auto& parameter : parameters_of(unit)) {
    if (place == known.left.size()) break;
    const auto& left = known.left[place++];
    const auto gradient = left.gradient.lock();
    if (!gradient.defined() || !gradient.is_same(parameter.shard.grad()) || gradient._version() != left.version) continue;
    kept++;
    which = which * 31 + place;
  }
  return kept == 0 ? std::string() : fmt::format(", added to {} {} #{:x}", kept, kEarlierGradients, which & 0xffff);
}

void EarlierGradients::note_end_of_pass() {
  for (auto& [unit, known] : known_) {
    if (!std::exchange(known.has_new, false)) continue;
    known.left.clear();
    for (const auto& parameter : parameters_of(*unit)) known.left.push_back(left_in(parameter.shard));
  }
}

}  // namespace tessera
