// Writes of a part of an array, which compilers make in place.
#pragma once

#include <set>
#include <utility>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// One plugin for CPUs computes a part while it writes it. What it computes of other places of the array it may have written before, and does
/// not notice.
class Overwriting {
 public:
  /// `own`: what the part of the array holds, as it would be read.
  Overwriting(Value array, Value own) : array_(std::move(array)), own_(std::move(own)) {}

  /// Whether `value` may be computed, together with the write, of other elements of the array than those in whose place it is written.
  bool reads_other_places(const Value& value) { return reads(value, /*moved=*/false); }

 private:
  bool reads(const Value& value, bool moved);
  bool is_same(const Value& value, const Value& own) const;

  const Value array_, own_;
  std::set<std::pair<const Node*, bool>> seen_;
};

}  // namespace tessera::xla
