// ValueSource: the source from which a model is loaded, files of a checkpoint or a state dict in memory.
#pragma once

#include <ATen/core/Tensor.h>

#include <span>
#include <string>

#include "tessera/checkpoint/stored/catalog.h"
#include "tessera/checkpoint/stored/rank_file.h"

namespace tessera::checkpoint {

class ValueSource {
 public:
  ValueSource() = default;
  ValueSource(const ValueSource&) = delete;
  ValueSource& operator=(const ValueSource&) = delete;
  virtual ~ValueSource() = default;

  /// The tensors and aliases of the source. Where a dict is the source, numbers of boxes take the place of numbers of files.
  virtual const Catalog& catalog() const = 0;
  /// Whether two names have the same values, as the names of a tied parameter have. A source that has only parts compares the parts.
  virtual bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> parts) const = 0;
  /// Throws unless the source has all that the ranks of this process need of a tensor.
  virtual void expect_parts(const std::string& name, std::span<const PartRecord> parts) const = 0;
  /// Called on all ranks, in the same order, before the tensor is read.
  virtual void open(const std::string& /*name*/) {}
  /// Copies the part of the tensor that this rank needs to flat values on the CPU, of any dtype.
  virtual void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int rank) const = 0;
};

}  // namespace tessera::checkpoint
