// Iterates over a source of batches, one after the other: for (auto& batch : loader)
#pragma once

#include <cstdint>
#include <iterator>
#include <memory>
#include <optional>

#include "tessera/data/samples.h"

namespace tessera::data {

/// A loop over a loader, by its number. It is open as long as somebody holds it: until its end, or where it is left.
using Loop = std::shared_ptr<const uint64_t>;

/// The source has next(), which returns nothing at the end, and loop(), which opens a loop over its loader.
template <class Source>
class BatchIterator {
 public:
  explicit BatchIterator(Source& source) : source_(&source), loop_(source.loop()), batch_(source.next()) {}
  Samples& operator*() { return *batch_; }
  BatchIterator& operator++() {
    batch_ = source_->next();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  Source* source_;
  Loop loop_;
  std::optional<Samples> batch_;
};

}  // namespace tessera::data
