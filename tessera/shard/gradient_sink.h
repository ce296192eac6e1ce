// GradientSink: takes the gradients of shards while a reduction computes them, so that the shards get no `.grad` and no memory for one.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/FunctionRef.h>

#include <memory>
#include <span>
#include <string>

namespace tessera {

class Unit;

class GradientSink {
 public:
  GradientSink() = default;
  GradientSink(const GradientSink&) = delete;
  GradientSink& operator=(const GradientSink&) = delete;
  virtual ~GradientSink() = default;

  /// Whether the sink takes the gradient of this shard.
  virtual bool takes(const at::Tensor& shard) const = 0;
  /// Returns a text that describes the sink. Ranks compare these texts, so ranks with different sinks get an error before anything is
  /// written.
  virtual const std::string& writer() = 0;

  /// Writes to `target` this rank's mean gradients of `part`, a flat tensor over a part of the shards.
  using Mean = c10::function_ref<void(const at::Tensor& part, const at::Tensor& target)>;
  /// Takes the gradients of these shards of a unit. All ranks have finished the backward of the unit, and no rank reads the unit's
  /// parameters any more, so the sink may write the shards. Called once for each backward pass.
  virtual void take(const std::shared_ptr<Unit>& unit, std::span<const at::Tensor> shards, const Mean& mean) = 0;
};

}  // namespace tessera
