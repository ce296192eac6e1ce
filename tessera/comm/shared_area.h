// Memory that all ranks of a group see, and counters by which they tell each other how far they are with it.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string_view>

#include "tessera/comm/shm/company.h"

namespace tessera {

/// A part for each rank, one after the other in rank order. Zeros at first; each rank's own processor core is the first to touch its part.
class SharedArea {
 public:
  static size_t block_size(const AreaShape& shape, int ranks);
  /// Makes sure that the memory of this rank's part is there. Throws IoError where there is not enough.
  static void commit(const SharedBlock& block, const AreaShape& shape, int rank, int ranks);

  SharedArea(SharedBlock block, const AreaShape& shape, std::shared_ptr<Company> company);

  int rank() const { return company_->rank(); }
  int size() const { return company_->size(); }
  std::byte* part(int rank) const { return block_.data() + static_cast<size_t>(rank) * shape_.bytes_per_rank; }
  /// All parts. Whoever keeps the pointer keeps the memory.
  std::shared_ptr<std::byte> data() const { return block_.memory(); }
  size_t bytes() const { return shape_.bytes_per_rank * static_cast<size_t>(size()); }

  /// This rank has come to `value` of a counter, and all that it wrote before is there for those who wait for that. Values wrap.
  void reach(int counter, uint32_t value) const { company_->raise(counters(counter)[static_cast<size_t>(rank())], value); }
  bool reached_by_all(int counter, uint32_t value) const;
  /// Until all ranks have come to it. From any thread. `what` says in the error what for. An error here ends the whole group.
  void wait(int counter, uint32_t value, std::chrono::milliseconds limit, const std::function<std::string()>& what) const;

  /// Who else has to hear of such an error.
  void when_broken(std::function<void(std::string_view)> tell) { tell_ = std::move(tell); }

 private:
  std::span<Counter> counters(int which) const;

  SharedBlock block_;
  AreaShape shape_;
  std::shared_ptr<Company> company_;
  std::function<void(std::string_view)> tell_;
};

}  // namespace tessera
