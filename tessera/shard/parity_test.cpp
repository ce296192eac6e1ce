// Unmodified models give the same bits in sharded as in replicated training, with every kind of module and every size of the world.
#include "tests/testing/parity.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/transports.h"

namespace tessera::testing::parity_test {
namespace {

namespace nn = torch::nn;
namespace F = torch::nn::functional;

/// A model in a few lines: modules registered by the constructor, one loss.
template <class Parts>
struct Of : TrainedModel {
  Parts parts;
  Of() : parts(*this) {}
  at::Tensor loss(at::Generator& batches) override { return parts.loss(batches); }
};

struct Mlp {
  nn::Linear a, b, c;
  nn::LayerNorm norm;
  explicit Mlp(nn::Module& m)
      : a(m.register_module("a", nn::Linear(8, 17))),
        b(m.register_module("b", nn::Linear(17, 17))),
        c(m.register_module("c", nn::Linear(17, 3))),
        norm(m.register_module("norm", nn::LayerNorm(nn::LayerNormOptions({17})))) {}
  at::Tensor loss(at::Generator& g) { return c(torch::relu(b(norm(torch::tanh(a(at::randn({5, 8}, g))))))).pow(2).mean(); }
};

struct Convolutions {
  nn::Conv2d first, second;
  nn::BatchNorm2d norm;
  nn::GroupNorm groups;
  nn::PReLU activation;
  explicit Convolutions(nn::Module& m)
      : first(m.register_module("first", nn::Conv2d(nn::Conv2dOptions(2, 6, 3)))),
        second(m.register_module("second", nn::Conv2d(nn::Conv2dOptions(6, 4, 3)))),
        norm(m.register_module("norm", nn::BatchNorm2d(6))),
        groups(m.register_module("groups", nn::GroupNorm(nn::GroupNormOptions(2, 4)))),
        activation(m.register_module("activation", nn::PReLU())) {}
  at::Tensor loss(at::Generator& g) { return groups(second(activation(norm(first(at::randn({3, 2, 9, 9}, g)))))).pow(2).sum(); }
};

struct ChannelsLast {
  nn::Conv2d conv;
  explicit ChannelsLast(nn::Module& m) : conv(m.register_module("conv", nn::Conv2d(nn::Conv2dOptions(4, 4, 3)))) {
    const torch::NoGradGuard no_grad;
    conv->weight.set_data(conv->weight.contiguous(at::MemoryFormat::ChannelsLast));
  }
  at::Tensor loss(at::Generator& g) { return conv(at::randn({2, 4, 6, 6}, g)).pow(2).mean(); }
};

struct Recurrent {
  nn::Embedding words;
  nn::LSTM lstm;
  nn::GRU gru;
  explicit Recurrent(nn::Module& m)
      : words(m.register_module("words", nn::Embedding(13, 6))),
        lstm(m.register_module("lstm", nn::LSTM(nn::LSTMOptions(6, 5).num_layers(2)))),
        gru(m.register_module("gru", nn::GRU(5, 4))) {}
  at::Tensor loss(at::Generator& g) {
    const auto x = words(at::randint(13, {7, 3}, g, at::kLong));
    return std::get<0>(gru(std::get<0>(lstm(x)))).pow(2).sum();
  }
};

struct Attention {
  nn::MultiheadAttention attention;
  nn::TransformerEncoder encoder;
  nn::Bilinear bilinear;
  explicit Attention(nn::Module& m)
      : attention(m.register_module("attention", nn::MultiheadAttention(8, 2))),
        encoder(m.register_module("encoder", nn::TransformerEncoder(nn::TransformerEncoderOptions(
                                                 nn::TransformerEncoderLayerOptions(8, 2).dropout(0).dim_feedforward(11), 2)))),
        bilinear(m.register_module("bilinear", nn::Bilinear(8, 8, 3))) {}
  at::Tensor loss(at::Generator& g) {
    const auto x = at::randn({4, 3, 8}, g);
    const auto h = encoder(std::get<0>(attention(x, x, x)));
    return bilinear(h, x).pow(2).mean();
  }
};

struct Containers {
  nn::ModuleList list;
  nn::Sequential sequential;
  nn::ParameterList parameters;
  nn::ParameterDict named;
  at::Tensor own;
  explicit Containers(nn::Module& m) : sequential(nn::Linear(6, 6), nn::ReLU(), nn::Linear(6, 6)) {
    for (int i = 0; i < 3; i++) list->push_back(nn::Linear(6, 6));
    m.register_module("list", list);
    m.register_module("sequential", sequential);
    parameters->append(torch::randn({6, 6}));
    m.register_module("parameters", parameters);
    named->insert("scale", torch::ones({6}));
    m.register_module("named", named);
    own = m.register_parameter("own", torch::full({6}, 0.5));
  }
  at::Tensor loss(at::Generator& g) {
    auto x = at::randn({4, 6}, g);
    for (const auto& layer : *list) x = torch::tanh(layer->as<nn::Linear>()->forward(x));
    return (sequential->forward(x.matmul((*parameters)[0]) * named["scale"]) + own).pow(2).mean();
  }
};

struct FusedSlices {
  at::Tensor qkv;
  explicit FusedSlices(nn::Module& m) : qkv(m.register_parameter("qkv", torch::randn({12, 4}))) {}
  at::Tensor loss(at::Generator& g) {
    const auto x = at::randn({5, 4}, g);
    const auto parts = qkv.chunk(3);
    const auto q = x.matmul(parts[0].t()), k = x.matmul(qkv.narrow(0, 4, 4).t()), v = x.matmul(qkv.index({torch::indexing::Slice(8)}).t());
    return (torch::softmax(q.matmul(k.t()), -1).matmul(v)).pow(2).sum() + qkv.view({2, 24})[0].sum() + qkv.t().contiguous()[1].sum();
  }
};

struct TiedTwiceUnused {
  nn::Embedding words;
  nn::Linear shared, unused;
  explicit TiedTwiceUnused(nn::Module& m)
      : words(m.register_module("words", nn::Embedding(11, 6))),
        shared(m.register_module("shared", nn::Linear(6, 6))),
        unused(m.register_module("unused", nn::Linear(6, 6))) {
    m.register_parameter("head", words->weight);  // tied: one tensor in two places
  }
  at::Tensor loss(at::Generator& g) {
    auto x = words(at::randint(11, {9}, g, at::kLong));
    x = torch::tanh(shared(torch::tanh(shared(x))));
    return torch::log_softmax(x.matmul(words->weight.t()), -1).pow(2).mean();
  }
};

struct PartlyFrozen {
  nn::Linear frozen, trained;
  explicit PartlyFrozen(nn::Module& m)
      : frozen(m.register_module("frozen", nn::Linear(6, 7))), trained(m.register_module("trained", nn::Linear(7, 2))) {
    for (auto& parameter : frozen->parameters()) parameter.set_requires_grad(false);
    trained->bias.set_requires_grad(false);
  }
  at::Tensor loss(at::Generator& g) { return trained(torch::tanh(frozen(at::randn({3, 6}, g)))).pow(2).mean(); }
};

struct SparseWords {
  nn::Embedding words;
  explicit SparseWords(nn::Module& m) : words(m.register_module("words", nn::Embedding(nn::EmbeddingOptions(11, 4).sparse(true)))) {}
  at::Tensor loss(at::Generator& g) { return words(at::randint(11, {5}, g, at::kLong)).pow(2).sum(); }
};

std::unique_ptr<torch::optim::Optimizer> sgd(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::SGD>(std::move(parameters), torch::optim::SGDOptions(0.05).momentum(0.9));
}
std::unique_ptr<torch::optim::Optimizer> adamw(std::vector<at::Tensor> parameters) {
  return std::make_unique<torch::optim::AdamW>(std::move(parameters), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
}

struct Case {
  std::string name;
  MakeModel make;
  bool children_apart = true;  // whether its children can be units of their own
  friend std::ostream& operator<<(std::ostream& out, const Case& self) { return out << self.name; }
};

template <class Parts>
Case of(std::string name, bool children_apart = true) {
  return {.name = std::move(name), .make = [] { return std::make_shared<Of<Parts>>(); }, .children_apart = children_apart};
}

class Model : public ::testing::TestWithParam<Case> {};

TEST_P(Model, TrainsAsOneUnitLikeAReplicatedOne) {
  for (const int ranks : {1, 2, 3, 4, 7}) expect_parity(ranks, GetParam().make, &sgd, 6, &as_one_unit);
}

TEST_P(Model, TrainsNestedLikeAReplicatedOne) {
  if (!GetParam().children_apart) return;
  for (const int ranks : {1, 2, 3, 4, 7}) expect_parity(ranks, GetParam().make, &adamw, 6, &nested);
}

INSTANTIATE_TEST_SUITE_P(Kinds, Model,
                         ::testing::Values(of<Mlp>("Mlp"), of<Convolutions>("Convolutions"), of<ChannelsLast>("ChannelsLast"),
                                           of<Recurrent>("Recurrent"), of<Attention>("Attention"), of<Containers>("Containers"),
                                           of<FusedSlices>("FusedSlices"), of<TiedTwiceUnused>("TiedTwiceUnused", false),
                                           of<PartlyFrozen>("PartlyFrozen"), of<SparseWords>("SparseWords")),
                         ::testing::PrintToStringParamName());

TEST_P(Model, TrainsOverTwoLevelsLikeAReplicatedOne) {
  for (const auto residence : {Residence::Gathered, Residence::NodeShared}) {
    const auto shard = [&](const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
      for (const auto& child : model->children()) {
        if (GetParam().children_apart) fully_shard(child, {.mesh = world, .residence = residence});
      }
      fully_shard(model, {.mesh = world, .residence = residence});
    };
    for (const auto& host_of : {std::vector{0, 0, 1, 1}, std::vector{0, 1, 1}}) {
      expect_parity(static_cast<int>(host_of.size()), GetParam().make, &adamw, 4, shard, {.host_of = host_of});
    }
  }
}

/// Shards each child as a unit, like the nested way, but every unit lists one vector.
void listed_flat(const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
  for (const auto& child : model->children()) fully_shard(child, {.mesh = world, .listing = Listing::Flat});
  fully_shard(model, {.mesh = world, .listing = Listing::Flat});
}

TEST_P(Model, TrainsListedFlatLikeAReplicatedOne) {
  if (!GetParam().children_apart) return;
  for (const int ranks : {1, 3}) {
    run_world({.transport = "threads", .ranks = ranks}, [&](const Communicator& world) {
      EXPECT_EQ(train(world, GetParam().make, &sgd, 6, &listed_flat).losses, train(world, GetParam().make, &sgd, 6).losses);
    });
  }
}

TEST(Training, StaysTheSameOverFiftySteps) {
  expect_parity(2, of<Mlp>("").make, &adamw, 50, &nested);
}

}  // namespace
}  // namespace tessera::testing::parity_test
