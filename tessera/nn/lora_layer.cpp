#include "tessera/nn/lora_layer.h"

#include <ATen/ATen.h>
#include <ATen/core/grad_mode.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/shard/weight_operator.h"

namespace tessera::lora {
namespace {

/// The operator that applies a layer's weight, and the places of its operands.
struct Operator {
  std::string_view name;
  size_t x, weight;
};

Operator operator_of(Kind kind) {
  if (kind == Kind::Embedding) return {"aten::embedding", 1, 0};
  return {kind == Kind::Linear ? "aten::linear" : "aten::conv2d", 0, 1};
}

at::Tensor norms_of_rows(const at::Tensor& weight, bool of_embedding) {
  return of_embedding ? weight.norm(2, 0) : weight.flatten(1).norm(2, 1);
}

/// Gives `numbers`, one for each row of the weight, a shape that broadcasts over the weight.
at::Tensor for_rows(const at::Tensor& numbers, const at::Tensor& weight, bool of_embedding) {
  std::vector<int64_t> sizes(static_cast<size_t>(weight.dim()), 1);
  sizes[of_embedding ? 1 : 0] = -1;
  return numbers.view(sizes);
}

/// Gives `numbers`, one for each row of the weight, a shape that broadcasts over the layer's output, for one image or several.
at::Tensor for_outputs(const at::Tensor& numbers, Kind kind) {
  return kind == Kind::Conv ? numbers.view({-1, 1, 1}) : numbers;
}

/// Calls conv2d with the padding in `arguments`, which is numbers or a name.
at::Tensor conv(const at::Tensor& x, const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                std::span<const c10::IValue> arguments, int64_t groups) {
  const auto stride = arguments[3].toIntVector(), dilation = arguments[5].toIntVector();
  if (arguments[4].isString()) return at::conv2d(x, weight, bias, stride, arguments[4].toStringView(), dilation, groups);
  return at::conv2d(x, weight, bias, stride, arguments[4].toIntVector(), dilation, groups);
}

}  // namespace

void Parameters::add(const std::string& adapter, const at::Tensor& value) {
  auto& tensor = tensors[adapter];
  if (!nested) {
    tensor = register_parameter(adapter, value);
    return;
  }
  const auto inner = register_module(adapter, std::make_shared<Module>());
  inner->train(is_training());
  tensor = inner->register_parameter("weight", value);
}

at::Tensor delta(const at::Tensor& weight, const Weights& adapter) {
  const auto product = adapter.b.flatten(1).matmul(adapter.a.flatten(1));
  return (adapter.of_embedding ? product.t() : product).reshape(weight.sizes()) * adapter.scaling;
}

at::Tensor merged(const at::Tensor& weight, const Weights& adapter) {
  const auto sum = weight + delta(weight, adapter);
  if (!adapter.magnitude.defined()) return sum;
  const auto scale = adapter.magnitude.flatten() / norms_of_rows(sum, adapter.of_embedding);
  return sum * for_rows(scale, weight, adapter.of_embedding);
}

Weights LayerAdapters::weights_of(const std::string& adapter) const {
  const bool has_magnitude = adapters.at(adapter).options.use_dora;
  return {.a = a->tensors.at(adapter),
          .b = b->tensors.at(adapter),
          .scaling = adapters.at(adapter).scaling,
          .magnitude = has_magnitude ? magnitudes->tensors.at(adapter) : at::Tensor(),
          .of_embedding = kind_ == Kind::Embedding};
}

at::Tensor LayerAdapters::row_norms(const std::string& adapter, const at::Tensor& weight) const {
  const c10::AutoGradMode no_grad(false);
  const auto own = weights_of(adapter);
  return norms_of_rows(weight + delta(weight, own), own.of_embedding);
}

void LayerAdapters::reset_magnitudes(const std::string& adapter, const at::Tensor& weight) {
  const c10::AutoGradMode no_grad(false);
  auto& values = magnitudes->tensors.at(adapter);
  values.copy_(row_norms(adapter, weight).view(values.sizes()));
}

at::Tensor LayerAdapters::plain(const at::Tensor& x, std::span<const c10::IValue> arguments, const std::optional<at::Tensor>& bias) const {
  const PlainOperators plainly;
  const auto weight = arguments[operator_of(kind_).weight].toTensor();
  if (kind_ == Kind::Conv) return conv(x, weight, bias, arguments, arguments[6].toInt());
  if (kind_ == Kind::Embedding) return at::embedding(weight, x, arguments[2].toInt(), arguments[3].toBool(), arguments[4].toBool());
  return at::linear(x, weight, bias);
}

at::Tensor LayerAdapters::low_rank(const at::Tensor& x, const std::string& adapter, std::span<const c10::IValue> arguments) const {
  const auto &down = a->tensors.at(adapter), &up = b->tensors.at(adapter);
  if (kind_ == Kind::Embedding) return at::linear(at::embedding(down.t(), x, arguments[2].toInt(), arguments[3].toBool()), up);
  if (kind_ == Kind::Linear) return at::linear(at::linear(x.to(down.scalar_type()), down), up);
  return at::conv2d(conv(x.to(down.scalar_type()), down, {}, arguments, /*groups=*/1), up, {}, at::IntArrayRef({1, 1}),
                    at::IntArrayRef({0, 0}), at::IntArrayRef({1, 1}), arguments[6].toInt());
}

at::Tensor LayerAdapters::with_adapters(std::span<const c10::IValue> arguments) const {
  const auto op = operator_of(kind_);
  const auto x = arguments[op.x].toTensor(), weight = arguments[op.weight].toTensor();
  const auto is_dora = [&](const std::string& name) { return adapters.at(name).options.use_dora; };
  std::optional<at::Tensor> bias, late_bias;
  if (kind_ != Kind::Embedding && arguments[2].isTensor() && arguments[2].toTensor().defined()) bias = arguments[2].toTensor();
  if (std::ranges::any_of(active, is_dora)) std::swap(bias, late_bias);  // DoRA scales the output before the bias is added
  const auto base = plain(x, arguments, bias);
  auto result = base;
  for (const auto& name : active) {
    const auto& [options, scaling] = adapters.at(name);
    const bool drops = options.lora_dropout > 0 && kind_ != Kind::Embedding && a->is_training();
    const auto dropped = drops ? at::dropout(x, options.lora_dropout, /*train=*/true) : x;
    auto added = low_rank(dropped, name, arguments) * scaling;
    if (options.use_dora) {
      const auto scale = for_outputs(magnitudes->tensors.at(name).flatten() / row_norms(name, weight), kind_);
      added = (scale - 1) * (drops ? plain(dropped, arguments, {}) : result) +
              scale * added;  // also scales the output of earlier adapters, as in peft
    }
    result = result + added;
  }
  if (late_bias) result = result + for_outputs(*late_bias, kind_);
  return result.to(base.scalar_type());  // adapters are in float32
}

std::optional<at::Tensor> LayerAdapters::run(std::string_view op, std::span<const c10::IValue> arguments) const {
  if (active.empty()) return std::nullopt;
  if (op == operator_of(kind_).name) return with_adapters(arguments);
  // If an embedding and the head share a weight, an adapter acts only in the layer that has it, as in peft.
  if (kind_ == Kind::Embedding || (is_embedding_too_ && op == operator_of(Kind::Embedding).name)) return std::nullopt;
  throw UsageError("'{}' has an adapter, which acts in {}, but {} uses its weight", name_, operator_of(kind_).name, op);
}

void LayerAdapters::merge_into(const at::Tensor& weight) {
  for (const auto& name : active) {
    const auto own = weights_of(name);
    merged_.push_back({name, own.magnitude.defined() ? row_norms(name, weight) : at::Tensor()});
    weight.copy_(lora::merged(weight, own));
  }
  active.clear();
}

void LayerAdapters::take_out_of(const at::Tensor& weight) {
  for (; !merged_.empty(); merged_.pop_back()) {
    const auto& [name, norms] = merged_.back();
    const auto own = weights_of(name);
    if (norms.defined()) weight.mul_(for_rows(norms / own.magnitude.flatten(), weight, own.of_embedding));
    weight.sub_(delta(weight, own));
    active.insert(active.begin(), name);
  }
}

}  // namespace tessera::lora
