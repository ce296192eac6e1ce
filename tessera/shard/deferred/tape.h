// Tape: the operators that compute the values of deferred tensors, in the order in which a program called them. The values of each tensor
// can be computed at any later time, without the values of other tensors.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tessera/base/tensor_slice.h"
#include "tessera/shard/deferred/keyed_random.h"
#include "tessera/shard/dispatch/operators.h"

namespace tessera {

/// A tensor that an operator saw or made: a view of the values that a storage had at that time. The values have a number: a storage gets a
/// new number with every operator that replaces all of its values.
struct TapeTensor {
  size_t number = 0;
  size_t bytes = 0;  // size of the storage
  c10::Device device;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool conjugated = false, negated = false;
  size_t argument = 0, element = 0;  // index among the operator's arguments or results, and index in a list of tensors

  TapeTensor(const at::Tensor& tensor, size_t number, size_t bytes, c10::Device device);
  /// Whether its values fill the storage.
  bool is_all() const;
};

/// The random numbers of one operator.
struct TapeDraw {
  size_t argument = 0;    // index of the generator among the operator's arguments
  at::Tensor state = {};  // the generator's state before the operator drew from it; undefined if the numbers come from `key`
  uint64_t key = 0;
  mutable bool has_final_key = false;  // whether `key` comes from the name of a tensor or was used, and so no longer changes
};

struct TapeRecord {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments = {};  // contains copies of tensors with values, and undefined tensors at the places of `operands`
  std::vector<TapeTensor> operands = {};
  std::vector<size_t> written = {};      // numbers of the values that the operator changes or makes
  std::vector<TapeTensor> results = {};  // the results that have storages of their own
  std::optional<TapeDraw> draw = {};
};

class Tape {
 public:
  /// With a seed, random numbers depend on the seed and on the names of tensors. Without a seed, they come from libtorch's generator.
  explicit Tape(std::optional<uint64_t> seed) : seed_(seed) {}
  bool is_seeded() const { return seed_.has_value(); }

  /// Returns the number of a new storage, whose values are not defined.
  size_t new_number();
  /// To be called when no tensor has the values of this number any more. Forgets the data that only they needed.
  void close(size_t number);
  void append(TapeRecord record);
  /// Gives the random numbers in the values of this number keys that depend on the name of their tensor, except where a key is final
  /// already.
  void name(size_t number, const std::string& name);

  /// Returns a key for random numbers that are drawn now, and so can't depend on the name of a tensor.
  uint64_t next_key() { return key_of(*seed_, {}, draws_[{}]++); }

  /// Computes the values of a tensor, in new memory.
  at::Tensor replay(const TapeTensor& wanted) const;
  /// Whether any range of a tensor's values, in memory order, can be computed without the rest.
  bool has_parts(const TapeTensor& wanted) const;
  /// Computes a range of a tensor's values, flat.
  at::Tensor replay(const TapeTensor& wanted, const ValueRange& range) const;
  /// Returns a hash of the recorded operators. Ranks compare it in place of the values if no rank has all values.
  uint64_t fingerprint(const TapeTensor& wanted) const;

 private:
  class Replay;
  std::set<size_t> records_for(size_t number) const;
  bool is_needed(size_t record) const;

  const std::optional<uint64_t> seed_;
  std::vector<TapeRecord> records_;
  std::vector<std::vector<size_t>> writers_, readers_;  // for each number, the records that write or read it
  std::vector<bool> open_;                              // for each number, whether some tensor has its values
  std::map<std::string, uint64_t> draws_;               // how many keys were made for each name
};

}  // namespace tessera
