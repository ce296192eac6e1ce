// ValueSource: the source from which a model is loaded: files of a checkpoint, or a state dict in memory.
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

  /// The tensors and aliases of the source. If the source is a dict, StoredBox::file is the number of the box in the tensor.
  virtual const Catalog& catalog() const = 0;
  /// Whether two names have the same values, as the names of a tied parameter have. May compare only these parts.
  virtual bool is_same(const std::string& one, const std::string& other, std::span<const PartRecord> parts) const = 0;
  /// Throws if the source lacks values of these parts of a tensor.
  virtual void expect_parts(const std::string& name, std::span<const PartRecord> parts) const = 0;
  /// Called on all ranks, in the same order, before the tensor is read.
  virtual void open(const std::string& /*name*/) {}
  /// Copies a part of a tensor, for this rank, to `values`, a flat CPU tensor of any dtype.
  virtual void read(const std::string& name, const PartRecord& part, const at::Tensor& values, int rank) const = 0;
};

}  // namespace tessera::checkpoint
