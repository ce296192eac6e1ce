// Iterates over what has batches, one after the other: for (auto& batch : loader)
#pragma once

#include <iterator>
#include <optional>

#include "tessera/data/samples.h"

namespace tessera::data {

/// The source has next(), which returns nothing at the end.
template <class Source>
class BatchIterator {
 public:
  explicit BatchIterator(Source& source) : source_(&source), batch_(source.next()) {}
  Samples& operator*() { return *batch_; }
  BatchIterator& operator++() {
    batch_ = source_->next();
    return *this;
  }
  bool operator==(std::default_sentinel_t) const { return !batch_; }

 private:
  Source* source_;
  std::optional<Samples> batch_;
};

}  // namespace tessera::data
