// A link through memory that all ranks see. The ranks may be threads or processes: the protocol is the same, so what the thread
// sanitizer says about threads holds for processes.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tessera/base/fd.h"
#include "tessera/comm/link.h"
#include "tessera/comm/shm/shared_block.h"

namespace tessera {

/// Each rank has a seat with two slots. In turn k it writes its slot k % 2, says that it has come to turn k, waits until all have, and
/// reads theirs. A slot is written again two turns later, when everybody's coming to the turn between has shown that it was read.
class BoardLink final : public Link {
 public:
  static size_t block_size(int ranks);

  BoardLink(SharedBlock block, int rank, int ranks);
  ~BoardLink() override;

  int rank() const override { return rank_; }
  int size() const override { return ranks_; }
  void gather(ConstBytes own, std::span<const Bytes> from, Clock::time_point deadline) override;
  void transpose(std::span<const ConstBytes> to, std::span<const Bytes> from, Clock::time_point deadline) override;
  std::unique_ptr<Link> split(std::span<const int> members, Clock::time_point deadline) override;
  void abort(std::string_view reason) noexcept override;

 private:
  struct Header;
  struct Seat;

  Header& header() const;
  Seat& seat(int rank) const;
  std::byte* slot(int rank) const;  // of the turn under way
  void wait_for_all(Clock::time_point deadline);
  void wait_for(int rank, Clock::time_point deadline);
  void expect_running() const;  // throws if somebody has aborted
  bool has_come(int rank) const;
  std::optional<std::string> gone(int rank);

  SharedBlock block_;
  std::optional<SharedBlock> split_block_;  // kept for those who open it later than this rank drops what it made of it
  int rank_;
  int ranks_;
  uint32_t turn_ = 0;
  std::vector<Fd> peers_;  // pid descriptors of ranks in other processes, for noticing their death
};

}  // namespace tessera
