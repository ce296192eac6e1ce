// Every form in which a model can use its parameters, with units that are resharded between forward and backward: the result is the same as
// without sharding, in float32 and in bfloat16, or the use is refused with an error.
#include <ATen/autocast_mode.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/training.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::parameter_uses_test {
namespace {

namespace nn = torch::nn;
namespace ag = torch::autograd;
using Tensors = std::vector<at::Tensor>;

/// One way to use parameters.
struct Form {
  std::string name;
  std::function<std::shared_ptr<nn::Module>()> make;
  std::function<at::Tensor(nn::Module&, const at::Tensor&)> value;
  at::Tensor x;
  friend std::ostream& operator<<(std::ostream& out, const Form& self) { return out << self.name; }
};

/// Parameters that belong to no layer.
struct Bag : nn::Module {
  Tensors own;
  explicit Bag(const std::vector<std::vector<int64_t>>& shapes) {
    for (const auto& sizes : shapes) own.push_back(register_parameter(std::string(own.size() + 1, 'p'), numbers(sizes)));
  }
};

using Value = at::Tensor (*)(const Tensors& w, const at::Tensor& x);

Form tensors(std::string name, std::vector<std::vector<int64_t>> shapes, Value value, at::Tensor x = numbers({5, 8})) {
  return {.name = std::move(name),
          .make = [shapes] { return std::make_shared<Bag>(shapes); },
          .value = [value](nn::Module& bag, const at::Tensor& input) { return value(dynamic_cast<Bag&>(bag).own, input); },
          .x = std::move(x)};
}

template <class Impl>
Form layer(std::string name, std::function<std::shared_ptr<Impl>()> make, at::Tensor (*value)(Impl&, const at::Tensor&), at::Tensor x) {
  return {.name = std::move(name),
          .make = std::move(make),
          .value = [value](nn::Module& module, const at::Tensor& input) { return value(dynamic_cast<Impl&>(module), input); },
          .x = std::move(x)};
}

template <class Impl>
at::Tensor call(Impl& layer, const at::Tensor& x) {
  return layer.forward(x);
}
template <class Impl>
at::Tensor first_of(Impl& layer, const at::Tensor& x) {
  return std::get<0>(layer.forward(x));
}

/// A unit of the form's parameters, and another unit. Only one of the two is unsharded at a time.
struct Sharded : nn::Module {
  std::shared_ptr<nn::Module> subject;
  std::shared_ptr<Bag> other;
  Sharded(const Form& form, const ShardOptions& options) {
    subject = register_module("subject", form.make());
    other = register_module("other", std::make_shared<Bag>(std::vector<std::vector<int64_t>>{{4}}));
    fill_with_numbers(*subject);
    fully_shard(*subject, options);
    fully_shard(*other, {.mesh = options.mesh});
    fully_shard(*this, {.mesh = options.mesh, .schedule = {.max_live_units = 1}});
  }
  /// Uses the other unit, so that the form's unit is resharded.
  at::Tensor nothing() { return (other->own[0] * 0).sum(); }
};

at::Tensor input_of(const Form& form) {
  return form.x.clone().set_requires_grad(form.x.is_floating_point());
}

class Use : public ::testing::TestWithParam<Form> {};

TEST_P(Use, SurvivesThatTheUnitIsFreedBeforeBackward) {
  const auto& form = GetParam();
  with_ranks(2, [&](const Communicator& world) {
    const auto whole = form.make();
    fill_with_numbers(*whole);
    Sharded sharded(form, {.mesh = world});
    for (int step = 0; step < 2; step++) {  // the second one knows the order of use
      whole->zero_grad();
      sharded.zero_grad();
      const auto x = input_of(form), y = input_of(form);
      const auto expected = form.value(*whole, x), actual = form.value(*sharded.subject, y);
      EXPECT_TRUE(at::allclose(actual, expected, 1e-5, 1e-6));
      expected.pow(2).mean().backward();
      (actual.pow(2).mean() + sharded.nothing()).backward();
      if (x.grad().defined()) {
        EXPECT_TRUE(at::allclose(y.grad(), x.grad(), 1e-5, 1e-6));
      }
      const auto shards = parameters(*sharded.subject);
      const auto originals = whole->parameters();
      ASSERT_EQ(shards.size(), originals.size());
      for (size_t i = 0; i < shards.size(); i++) {
        EXPECT_TRUE(at::allclose(full_grad(shards[i]), originals[i].grad(), 1e-5, 1e-6)) << "parameter " << i << ", step " << step;
      }
    }
  });
}

/// Saves the weight itself, as an extension would.
struct SavesWeight : ag::Function<SavesWeight> {
  static at::Tensor forward(ag::AutogradContext* context, const at::Tensor& x, const at::Tensor& weight) {
    context->save_for_backward({x, weight});
    return x.matmul(weight);
  }
  static ag::variable_list backward(ag::AutogradContext* context, ag::variable_list gradients) {
    const auto saved = context->get_saved_variables();
    return {gradients[0].matmul(saved[1].t()), saved[0].t().matmul(gradients[0])};
  }
};

const at::Tensor kIndices = here(torch::tensor({1, 0, 5, 2, 2}));

std::vector<Form> forms() {
  return {tensors("as_strided", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0].as_strided({8, 8}, {1, 8})); }),
          tensors("unfold", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0].unfold(1, 4, 2).reshape({8, 12})); }),
          tensors("expand", {{1, 8}}, [](auto& w, auto& x) { return x * w[0].expand({5, 8}); }),
          tensors("chunk_split_unbind", {{24, 8}},
                  [](auto& w, auto& x) {
                    const auto chunks = w[0].chunk(3), parts = w[0].split(8), planes = w[0].view({3, 8, 8}).unbind();
                    return x.matmul(chunks[0].t()) + x.matmul(parts[1].t()) * x.matmul(planes[2]);
                  }),
          tensors("transposed_and_copied", {{8, 6}}, [](auto& w, auto& x) { return x.matmul(w[0].t().contiguous().t()); }),
          tensors("alias", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0].contiguous().to(at::kFloat).alias().view_as(w[0])); }),
          tensors("weight_norm_by_hand", {{8, 1}, {8, 8}},
                  [](auto& w, auto& x) { return x.matmul((w[0] * w[1] / w[1].norm(2, 1, true)).t()); }),
          tensors("weight_norm", {{8, 8}, {8, 1}}, [](auto& w, auto& x) { return x.matmul(at::_weight_norm(w[0], w[1], 0)); }),
          tensors("computed_weight_used_twice", {{8, 8}},
                  [](auto& w, auto& x) {
                    const auto symmetric = w[0].triu() + w[0].triu(1).t();
                    return x.matmul(symmetric).tanh().matmul(symmetric);
                  }),
          tensors("weights_first", {{8, 8}, {8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0].matmul(w[1])); }),
          tensors(
              "index_gather_embedding", {{8, 8}},
              [](auto& w, auto& x) {
                return w[0].index_select(0, x) * w[0].gather(0, x.view({1, 5})).sum() + at::embedding(w[0], x).sum() + w[0].index({x}) +
                       w[0][2];
              },
              kIndices),
          tensors("einsum", {{8, 8}}, [](auto& w, auto& x) { return at::einsum("bi,ij->bj", {x, w[0]}); }),
          tensors("saved_results", {{8}}, [](auto& w, auto& x) { return x * w[0].sigmoid() + w[0].exp(); }),
          tensors("where_cat_stack", {{8}, {8}},
                  [](auto& w, auto& x) {
                    return x * at::where(x > 0, w[0], w[1]) + at::cat({w[0], w[1]}).sum() + at::stack({w[0], w[1]}).prod(0);
                  }),
          tensors("detached", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0].detach()) + x.matmul(w[0]); }),
          tensors("complex", {{8, 2}},
                  [](auto& w, auto& x) {
                    const auto z = at::view_as_complex(w[0]);
                    return (z * x).abs() + at::real(z.conj().mul(x));
                  }),
          tensors("read_on_the_host", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0]) * w[0][0][1].template item<double>(); }),
          tensors("double", {{8, 8}}, [](auto& w, auto& x) { return x.to(at::kDouble).matmul(w[0].to(at::kDouble)).to(at::kFloat); }),
          tensors("sparse", {{8, 8}}, [](auto& w, auto& x) { return at::mm(w[0].to_sparse(), x.t()).t(); }),
          tensors("decompositions", {{3, 3}},
                  [](auto& w, auto& x) {
                    const auto regular = w[0] + 3 * at::eye(3);
                    return x.slice(1, 0, 3).matmul(at::inverse(regular)) + std::get<1>(at::linalg_svd(regular)).sum();
                  }),
          tensors("changed_copy", {{8, 8}}, [](auto& w, auto& x) { return x.matmul((w[0] + 0).mul_(2)); }),
          tensors("changed_activation", {{8}, {8}}, [](auto& w, auto& x) { return (x * 1).mul_(w[0]).add_(w[1]); }),
          tensors("loss_over_weights", {{8, 8}}, [](auto& w, auto& x) { return x.matmul(w[0]) + w[0].pow(2).sum(); }),
          tensors("saved_by_a_function", {{8, 8}}, [](auto& w, auto& x) { return SavesWeight::apply(x, w[0]); })};
}

INSTANTIATE_TEST_SUITE_P(OfTensors, Use, ::testing::ValuesIn(forms()), ::testing::PrintToStringParamName());

const auto kSequence = numbers({7, 3, 8});
const auto kImage = numbers({2, 4, 6, 6});

std::vector<Form> layers_in_any_dtype() {
  return {
      layer<nn::LinearImpl>(
          "Linear", [] { return nn::Linear(8, 6).ptr(); }, &call, numbers({5, 8})),
      layer<nn::LayerNormImpl>(
          "LayerNorm", [] { return nn::LayerNorm(nn::LayerNormOptions({8})).ptr(); }, &call, numbers({5, 8})),
      layer<nn::GroupNormImpl>(
          "GroupNorm", [] { return nn::GroupNorm(2, 4).ptr(); }, &call, kImage),
      layer<nn::PReLUImpl>(
          "PReLU", [] { return nn::PReLU(nn::PReLUOptions().num_parameters(8)).ptr(); }, &call, numbers({5, 8})),
      layer<nn::BilinearImpl>(
          "Bilinear", [] { return nn::Bilinear(8, 8, 3).ptr(); },
          [](nn::BilinearImpl& bilinear, const at::Tensor& x) { return bilinear.forward(x, x); }, numbers({5, 8})),
      layer<nn::Conv2dImpl>(
          "Conv2d", [] { return nn::Conv2d(nn::Conv2dOptions(4, 6, 3)).ptr(); }, &call, kImage),
      layer<nn::ConvTranspose2dImpl>(
          "ConvTranspose2d", [] { return nn::ConvTranspose2d(nn::ConvTranspose2dOptions(4, 6, 3)).ptr(); },
          [](nn::ConvTranspose2dImpl& convolution, const at::Tensor& x) { return convolution.forward(x); }, kImage),
      layer<nn::EmbeddingImpl>(
          "Embedding", [] { return nn::Embedding(6, 4).ptr(); }, &call, kIndices),
      layer<nn::LSTMImpl>(
          "LSTM", [] { return nn::LSTM(nn::LSTMOptions(8, 6).num_layers(2).bidirectional(true)).ptr(); }, &first_of, kSequence),
      layer<nn::GRUImpl>(
          "GRU", [] { return nn::GRU(nn::GRUOptions(8, 6).num_layers(2)).ptr(); }, &first_of, kSequence),
      layer<nn::MultiheadAttentionImpl>(
          "MultiheadAttention", [] { return nn::MultiheadAttention(8, 2).ptr(); },
          [](nn::MultiheadAttentionImpl& attention, const at::Tensor& x) { return std::get<0>(attention.forward(x, x, x)); }, kSequence),
  };
}

std::vector<Form> layers() {
  auto result = layers_in_any_dtype();
  result.push_back(layer<nn::EmbeddingBagImpl>(
      "EmbeddingBag", [] { return nn::EmbeddingBag(nn::EmbeddingBagOptions(6, 4).mode(torch::kMean)).ptr(); },
      [](nn::EmbeddingBagImpl& bag, const at::Tensor& x) { return bag.forward(x.view({1, 5})); }, kIndices));
  result.push_back(layer<nn::LSTMCellImpl>(
      "LSTMCell", [] { return nn::LSTMCell(8, 6).ptr(); },
      [](nn::LSTMCellImpl& cell, const at::Tensor& x) { return std::get<0>(cell.forward(x)); }, numbers({5, 8})));
  result.push_back(layer<nn::BatchNorm2dImpl>("BatchNorm2d", [] { return nn::BatchNorm2d(4).ptr(); }, &call, kImage));
  return result;
}

INSTANTIATE_TEST_SUITE_P(OfLayers, Use, ::testing::ValuesIn(layers()), ::testing::PrintToStringParamName());

// --- Mixed precision ---

class Narrow : public ::testing::TestWithParam<Form> {};

TEST_P(Narrow, IsTheLayerInBfloat16ToTheBit) {
  const auto& form = GetParam();
  with_ranks(2, [&](const Communicator& world) {
    const auto narrow = form.make();
    fill_with_numbers(*narrow);
    narrow->to(at::kBFloat16);
    Sharded sharded(form, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    const auto x = input_of(form);
    const auto expected = form.value(*narrow, x.is_floating_point() ? x.detach().to(at::kBFloat16) : x);
    const auto actual = form.value(*sharded.subject, x);
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(actual, expected));
    expected.sum().backward();
    (actual.sum() + sharded.nothing()).backward();
    if (x.requires_grad()) {
      EXPECT_EQ(x.grad().scalar_type(), at::kFloat);
    }
    const auto shards = parameters(*sharded.subject);
    const auto originals = narrow->parameters();
    for (size_t i = 0; i < shards.size(); i++) {
      EXPECT_EQ(shards[i].grad().scalar_type(), at::kFloat);
      EXPECT_TRUE(at::equal(full_grad(shards[i]), originals[i].grad().to(at::kFloat))) << "parameter " << i;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(OfLayers, Narrow, ::testing::ValuesIn(layers_in_any_dtype()), ::testing::PrintToStringParamName());

TEST(MixedPrecision, CastsWhatIsReadAndNothingThatIsWritten) {
  with_ranks(2, [](const Communicator& world) {
    nn::LayerNorm norm(nn::LayerNormOptions({8}));
    fully_shard(norm, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    auto x = numbers({5, 8});
    const auto expected = x.clone();
    const torch::NoGradGuard no_grad;
    x.mul_(norm->weight).add_(norm->bias);  // ones and zeros
    EXPECT_EQ(x.scalar_type(), at::kFloat);
    EXPECT_TRUE(at::equal(x, expected)) << "the written operand went through bfloat16";
    // Operands of backward operators are not cast: a wide gradient stays wide.
    EXPECT_EQ(at::sigmoid_backward(x[0], norm->weight).scalar_type(), at::kFloat);
  });
}

TEST(MixedPrecision, ByAutocastIsThatOfTorch) {
  if (!on_cpu()) GTEST_SKIP() << "it is about autocast of the CPU";
  with_ranks(2, [](const Communicator& world) {
    auto whole = seeded_net();
    auto net = sharded_net(world);
    at::autocast::set_autocast_enabled(at::kCPU, true);
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    const auto expected = whole(input()), actual = net(input());
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
    EXPECT_EQ(actual.scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(actual, expected));
    expected.sum().backward();
    actual.sum().backward();
    for (size_t i = 0; i < 6; i++) EXPECT_TRUE(at::equal(full_grad(parameters(*net)[i]), whole->parameters()[i].grad())) << i;
  });
}

}  // namespace
}  // namespace tessera::testing::parameter_uses_test
