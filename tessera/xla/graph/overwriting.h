// Finds writes to a part of an array whose new values depend on other parts of the array. They need a barrier, because compilers may write
// in place.
#pragma once

#include <set>
#include <utility>

#include "tessera/xla/graph/node.h"

namespace tessera::xla {

/// One CPU plugin computes the new values of a part while it writes them in place, so a value that depends on other elements of the array
/// may read elements that are already overwritten.
class Overwriting {
 public:
  /// `own` is the old value of the part of `array` that is written.
  Overwriting(Value array, Value own) : array_(std::move(array)), own_(std::move(own)) {}

  /// Whether an element of `value`, if the compiler fuses `value` with the write, may depend on other elements of the array than the one
  /// that it replaces.
  bool reads_other_places(const Value& value) { return reads(value, /*moved=*/false); }

 private:
  bool reads(const Value& value, bool moved);
  bool is_same(const Value& value, const Value& own) const;

  const Value array_, own_;
  std::set<std::pair<const Node*, bool>> seen_;
};

}  // namespace tessera::xla
