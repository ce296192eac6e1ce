// Where the parameters of a unit live: whole for a while, cut for ever. The unit knows when; the residence knows how.
#pragma once

#include <ATen/core/Tensor.h>

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "tessera/comm/communicator.h"

namespace tessera {

class Unit;

/// What a read is about, for engines that record instead of running.
struct Fault {
  std::span<at::Tensor> companions = {};  // the other operands of the operator that touched the unit
};

/// One flat buffer of a unit as its residence sees it.
struct Buffer {
  c10::intrusive_ptr<c10::StorageImpl> full;  // every parameter is a view of it
  at::ScalarType full_dtype;
  at::Tensor own;  // this rank's chunk, flat, in the dtype that optimizers work in
};

///      cut  --read(fault)-->  whole  --give_back()-->  cut
///      cut  --write()-->      own parts may change
class Residence {
 public:
  virtual ~Residence() = default;

  /// Begins to make the unit whole; it is when all the work is done.
  virtual std::vector<Work> read(std::span<const Buffer> buffers, Subject subject, const Fault& fault) = 0;
  virtual void give_back(std::span<const Buffer> buffers, const std::string& unit) = 0;
  /// Somebody is about to change the own parts.
  virtual void write() = 0;
  /// Bytes that a whole unit takes on this rank.
  virtual uint64_t whole_bytes(std::span<const Buffer> buffers) const = 0;
};

/// An all-gather fills memory of the device; giving back frees it.
std::unique_ptr<Residence> gathered_residence(Communicator shard);

}  // namespace tessera
