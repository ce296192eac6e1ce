#include "models.h"

#include <functional>
#include <map>

#include "tessera/base/error.h"
#include "tessera/models/gpt.h"
#include "tests/testing/numbers.h"

namespace tessera::parity {
namespace {

namespace nn = torch::nn;
using testing::numbers;

struct Mlp : Model {
  nn::Linear first{nullptr}, second{nullptr}, last{nullptr};
  nn::LayerNorm norm{nullptr};
  Mlp() {
    first = register_module("first", nn::Linear(8, 32));
    norm = register_module("norm", nn::LayerNorm(nn::LayerNormOptions({32})));
    second = register_module("second", nn::Linear(32, 32));
    last = register_module("last", nn::Linear(32, 4));
  }
  at::Tensor forward(const at::Tensor& x) override { return last(torch::relu(second(norm(torch::tanh(first(x)))))); }
};

/// A GPT whose modules have the names that they have in a tessera::models::Gpt.
struct Gpt : Model {
  models::Gpt gpt{models::GptOptions{.vocabulary = 30, .width = 16, .layers = 2, .heads = 2, .longest = 9}};
  explicit Gpt(const std::string& leaves_out = "") {
    for (const auto& child : gpt->named_children()) {
      if (child.key() != leaves_out) register_module(child.key(), child.value());
    }
  }
  at::Tensor input(int64_t shift) override { return (at::arange(27, at::kLong) * 7 + 3 * shift).remainder(30).view({3, 9}); }
  at::Tensor forward(const at::Tensor& ids) override { return gpt(ids); }
  at::Tensor loss(const at::Tensor& output, int64_t shift) override {
    return nn::functional::cross_entropy(output.flatten(0, 1), input(shift + 1).flatten());
  }
};

/// Its head is its embedding.
struct Tied : Gpt {
  at::Tensor head;
  Tied() : Gpt("head") { head = register_parameter("head", gpt->tokens->weight); }
  at::Tensor forward(const at::Tensor& ids) override {
    auto x = gpt->tokens(ids) + gpt->positions(at::arange(ids.size(1), ids.options()));
    for (const auto& block : *gpt->blocks) x = block->as<models::GptBlock>()->forward(x);
    return at::linear(gpt->norm(x), head);
  }
};

struct Conv : Model {
  nn::Conv2d first{nullptr}, second{nullptr};
  nn::BatchNorm2d norm{nullptr};
  Conv() {
    first = register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 6, 3)));
    norm = register_module("norm", nn::BatchNorm2d(6));
    second = register_module("second", nn::Conv2d(nn::Conv2dOptions(6, 4, 3)));
  }
  at::Tensor input(int64_t shift) override { return numbers({3, 2, 8, 8}, static_cast<double>(shift)); }
  at::Tensor forward(const at::Tensor& x) override { return second(torch::relu(norm(first(x)))); }
};

struct Lstm : Model {
  nn::LSTM lstm{nullptr};
  nn::Linear head{nullptr};
  Lstm() {
    lstm = register_module("lstm", nn::LSTM(nn::LSTMOptions(8, 10).num_layers(2)));
    head = register_module("head", nn::Linear(10, 3));
  }
  at::Tensor input(int64_t shift) override { return numbers({5, 4, 8}, static_cast<double>(shift)); }
  // In one operator, as in Python; torch::nn::Linear takes two, which shows in bfloat16.
  at::Tensor forward(const at::Tensor& x) override { return at::linear(std::get<0>(lstm(x)), head->weight, head->bias); }
};

/// Takes one of two ways, by the first value of its input.
struct Branches : Model {
  nn::Linear first{nullptr}, left{nullptr}, right{nullptr}, last{nullptr};
  Branches() {
    first = register_module("first", nn::Linear(8, 8));
    left = register_module("left", nn::Linear(8, 8));
    right = register_module("right", nn::Linear(8, 8));
    last = register_module("last", nn::Linear(8, 3));
  }
  at::Tensor input(int64_t shift) override {
    auto x = numbers({6, 8}, static_cast<double>(shift));
    x[0][0] = shift % 2;
    return x;
  }
  at::Tensor forward(const at::Tensor& x) override {
    auto& way = x[0][0].item<double>() == 0 ? left : right;
    return last(torch::tanh(way(torch::tanh(first(x)))));
  }
};

template <class M>
std::shared_ptr<Model> make() {
  return std::make_shared<M>();
}

}  // namespace

at::Tensor Model::input(int64_t shift) {
  return numbers({6, 8}, static_cast<double>(shift));
}

at::Tensor Model::loss(const at::Tensor& output, int64_t shift) {
  return (output - numbers(output.sizes(), static_cast<double>(shift) + 5)).pow(2).mean();
}

std::shared_ptr<Model> make_model(const std::string& name) {
  static const std::map<std::string, std::shared_ptr<Model> (*)()> kModels = {{"mlp", &make<Mlp>},   {"gpt", &make<Gpt>},
                                                                              {"tied", &make<Tied>}, {"conv", &make<Conv>},
                                                                              {"lstm", &make<Lstm>}, {"branches", &make<Branches>}};
  static std::mutex generator;  // which all ranks share
  std::lock_guard lock(generator);
  auto model = kModels.at(name)();
  const torch::NoGradGuard no_grad;
  int shift = 0;
  for (auto& parameter : distinct_parameters(*model)) parameter.copy_(numbers(parameter.sizes(), shift++).mul(0.3));
  return model;
}

std::vector<at::Tensor> distinct_parameters(const torch::nn::Module& model) {
  std::vector<at::Tensor> result;
  for (const auto& parameter : model.parameters()) {
    if (std::ranges::none_of(result, [&](const auto& known) { return known.is_same(parameter); })) result.push_back(parameter);
  }
  return result;
}

std::vector<at::Tensor> parameters_of(const torch::nn::Module& model, const std::vector<std::string>& names) {
  std::vector<at::Tensor> result;
  for (const auto& name : names) {
    const auto before = result.size();
    for (const auto& parameter : model.named_parameters()) {
      if (parameter.key() == name || parameter.key().starts_with(name + ".")) result.push_back(parameter.value());
    }
    if (result.size() == before) throw UsageError("no parameters in '" + name + "'");
  }
  return result;
}

std::shared_ptr<torch::nn::Module> module_of(Model& model, const std::string& name) {
  return name.empty() ? model.shared_from_this() : model.named_modules()[name];
}

}  // namespace tessera::parity
