// LayerAdapters: the adapters of one layer, which run in place of the operator of its weight.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <torch/nn/module.h>

#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tessera/nn/lora.h"

namespace tessera::lora {

enum class Kind { Linear, Embedding, Conv };

class LayerAdapters;

/// One kind of parameters of a layer's adapters. Named like the module dictionaries of peft: layer.lora_A.default.weight, or
/// layer.lora_embedding_A.default.
struct Parameters : torch::nn::Module {
  Parameters(bool nested, const std::shared_ptr<LayerAdapters>& owner) : nested(nested), owner(owner) {}

  void add(const std::string& adapter, const at::Tensor& value);

  const bool nested;
  const std::weak_ptr<LayerAdapters> owner;
  std::map<std::string, at::Tensor> tensors;
};

/// Holds the adapters of a layer. run() runs in place of each operator on the layer's weight.
class LayerAdapters {
 public:
  /// `is_embedding_too`: whether an embedding of the model shares the layer's weight.
  LayerAdapters(Kind kind, std::string name, bool is_embedding_too)
      : kind_(kind), name_(std::move(name)), is_embedding_too_(is_embedding_too) {}

  std::optional<at::Tensor> run(std::string_view op, std::span<const c10::IValue> arguments) const;
  /// merge_into() adds the active adapters to the weight and makes them inactive; take_out_of() does the reverse.
  void merge_into(const at::Tensor& weight);
  void take_out_of(const at::Tensor& weight);
  bool has_merged() const { return !merged_.empty(); }
  /// Sets DoRA's magnitudes to row_norms(), so that they change nothing at first.
  void reset_magnitudes(const std::string& adapter, const at::Tensor& weight);

  struct Adapter {
    Options options;
    double scaling;
  };
  std::map<std::string, Adapter> adapters;
  std::vector<std::string> active;
  std::shared_ptr<Parameters> a, b, magnitudes;

 private:
  /// An adapter that merge_into() has added to the weight. merged_ has them in the order in which they were merged.
  struct Merged {
    std::string adapter;
    at::Tensor norms;  // the row norms before DoRA scaled the rows; undefined without DoRA
  };

  at::Tensor low_rank(const at::Tensor& x, const std::string& adapter, std::span<const c10::IValue> arguments) const;
  /// The layer's output for x without adapters.
  at::Tensor plain(const at::Tensor& x, std::span<const c10::IValue> arguments, const std::optional<at::Tensor>& bias) const;
  at::Tensor with_adapters(std::span<const c10::IValue> arguments) const;
  Weights weights_of(const std::string& adapter) const;
  /// Returns the row norms of the weight plus the adapter's delta(). They are constants to autograd, as in section 4.3 of the paper on
  /// DoRA.
  at::Tensor row_norms(const std::string& adapter, const at::Tensor& weight) const;

  const Kind kind_;
  const std::string name_;
  const bool is_embedding_too_;
  std::vector<Merged> merged_ = {};
};

/// Returns what an adapter adds to a weight.
at::Tensor delta(const at::Tensor& weight, const Weights& adapter);

}  // namespace tessera::lora
