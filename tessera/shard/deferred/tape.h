// Tape: the operators that compute the values of deferred tensors, in the order in which a program called them. The values of each tensor
// can be computed at any later time, without those of the others.
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
  size_t bytes = 0;  // of the storage
  c10::Device device;
  at::ScalarType dtype;
  std::vector<int64_t> sizes, strides;
  int64_t offset = 0;
  bool conjugated = false, negated = false;
  size_t argument = 0, element = 0;  // its place among the arguments or results, and in a list

  TapeTensor(const at::Tensor& tensor, size_t number, size_t bytes, c10::Device device);
  /// Whether its values fill the storage.
  bool is_all() const;
};

/// The random numbers of one operator.
struct TapeDraw {
  size_t argument = 0;    // index of the generator among the operator's arguments
  at::Tensor state = {};  // of the generator, before the operator drew from it; undefined if the numbers come from `key`
  uint64_t key = 0;
  mutable bool has_final_key = false;  // whether the key comes from the name of a tensor, or was used
};

struct TapeRecord {
  c10::OperatorHandle handle;
  torch::jit::Stack arguments = {};  // with copies of tensors that have values; undefined at the places of `operands`
  std::vector<TapeTensor> operands = {};
  std::vector<size_t> written = {};      // numbers of the values that it changes or makes
  std::vector<TapeTensor> results = {};  // those with storages of their own
  std::optional<TapeDraw> draw = {};
};

class Tape {
 public:
  /// With a seed, random numbers depend on it and on the names of tensors. Without one they are those of the generator.
  explicit Tape(std::optional<uint64_t> seed) : seed_(seed) {}
  bool is_seeded() const { return seed_.has_value(); }

  /// Returns the number of a new storage, whose values are not defined.
  size_t new_number();
  /// To be called when no tensor has the values of this number any more. Forgets the data that only they needed.
  void close(size_t number);
  void append(TapeRecord record);
  /// Keys the random numbers in the values of this number by the name of their tensor, except those that have a final key already.
  void name(size_t number, const std::string& name);

  /// A key for random numbers that are needed at once.
  uint64_t next_key() { return key_of(*seed_, {}, draws_[{}]++); }

  /// Computes the values, in new memory.
  at::Tensor replay(const TapeTensor& wanted) const;
  /// Whether any range of a tensor's values, in memory order, can be computed without the others.
  bool has_parts(const TapeTensor& wanted) const;
  /// Computes such a range, flat.
  at::Tensor replay(const TapeTensor& wanted, const ValueRange& range) const;
  /// A hash of the operators, by which ranks compare values of which no rank has all.
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
