// Random models with random units, worlds and sequences of steps, compared with replicated training.
#include <gtest/gtest.h>

#include <bit>
#include <chrono>
#include <cstdlib>
#include <random>

#include "tessera/base/compat.h"
#include "tessera/base/env.h"
#include "tessera/comm/self/self.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/call.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/reduction.h"
#include "tessera/shard/unsharding.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/default_device.h"
#include "tests/testing/parity.h"

namespace tessera::testing::property_test {
namespace {

namespace nn = torch::nn;
using Random = std::mt19937;

/// Changes that a program makes to its parameters besides training them: the same on all ranks, and value by value.
enum class Move { None, ByOperator, ByPointer, FreezeMember, FreezeParameter, SecondOptimizer, Count };

/// Layers drawn by lot: some used twice, some frozen, some skipped now and then by all ranks alike or by some of them, one whose weight was
/// a view.
struct Drawn : TrainedModel {
  std::vector<nn::Linear> layers;
  std::vector<at::Tensor> transposed;  // weights that lie in memory column by column
  at::Tensor scale;                    // a row of a matrix, when it was registered
  std::vector<int> order;              // in which layers are used
  int width;
  int step = 0;
  std::vector<Move> moves;  // one for each step
  int target = 0;           // the layer that is frozen and thawed
  bool throws = false;      // now and then, in the middle of a forward pass
  std::unique_ptr<torch::optim::Optimizer> second;
  bool keeps_gradients;  // until the end of the step
  bool ranks_differ;     // in what a pass leaves out
  bool calls;            // layers by tessera::call

  Drawn(unsigned seed, bool keeps_gradients, bool ranks_differ) : keeps_gradients(keeps_gradients), ranks_differ(ranks_differ) {
    Random lot(seed);
    width = 1 + static_cast<int>(lot() % 9);
    const int count = 1 + static_cast<int>(lot() % 5);
    for (int i = 0; i < count; i++) {
      nn::Linear layer(nn::LinearOptions(width, width).bias(lot() % 3 != 0));
      if (lot() % 4 == 0) {
        layer->weight.set_data(layer->weight.detach().t().contiguous().t());
        transposed.push_back(layer->weight);
      }
      if (i > 0 && lot() % 4 == 0) layer->weight.set_requires_grad(false);
      if (layer->weight.requires_grad() && lot() % 3 == 0) {
        layer->weight.register_hook([](const at::Tensor& gradient) { return gradient * 0.5; });
      }
      layers.push_back(register_module("layer" + std::to_string(i), layer));
    }
    scale = register_parameter("scale", at::linspace(0.5, 1.5, 2 * width).view({width, 2}).t()[lot() % 2]);
    const int uses = count + static_cast<int>(lot() % 4);
    for (int i = 0; i < uses; i++) order.push_back(i < count ? i : static_cast<int>(lot() % static_cast<unsigned>(count)));
    for (int i = 0; i < 9; i++) moves.push_back(static_cast<Move>(lot() % static_cast<unsigned>(Move::Count)));
    target = static_cast<int>(lot() % static_cast<unsigned>(count));
    throws = lot() % 3 == 0;
    calls = lot() % 2 == 0;
  }

  at::Tensor forward(at::Tensor x, at::Generator& batches, size_t most = 100) {
    for (size_t i = 0; i < order.size(); i++) {
      if (i == most) throw std::runtime_error("enough");
      if (i > 0 && (static_cast<size_t>(step) + i) % 7 == 6) continue;  // a step that uses other layers than the recorded one
      if (ranks_differ && at::rand({}, batches).item<float>() < 0.25F) continue;
      auto& layer = layers[static_cast<size_t>(order[i])];
      x = torch::tanh(calls ? call(layer, x) : layer(x)) + x;
    }
    return x * scale;
  }

  at::Tensor loss(at::Generator& batches) override {
    step++;
    if (throws && step % 3 == 2) {
      try {
        forward(at::ones({2, width}), batches, 1);
      } catch (const std::runtime_error&) {
      }
    }
    auto total = forward(at::randn({3, width}, batches), batches).pow(2).mean();
    if (step % 3 == 0) total = total + forward(at::randn({2, width}, batches), batches).sum() * 0.1;  // two forwards, one backward
    if (step % 4 == 0) {
      const torch::NoGradGuard no_grad;
      forward(at::randn({1, width}, batches), batches);  // an evaluation between
    }
    return total;
  }

  void after_step(const std::vector<at::Tensor>& parameters) override {
    const torch::NoGradGuard no_grad;
    const auto chosen = parameters[static_cast<size_t>(step) % parameters.size()];
    const auto frozen = parameters[1 + static_cast<size_t>(step) % (parameters.size() - 1)];  // never the scale: something has to train
    auto& weight = layers[static_cast<size_t>(target)]->weight;
    switch (moves[static_cast<size_t>(step - 1) % moves.size()]) {
      case Move::ByOperator:
        chosen.clamp_(-0.5, 0.5).mul_(0.75);
        break;
      case Move::ByPointer: {
        if (chosen.is_same(parameters[0])) break;  // the plain scale has gaps
        if (!on_cpu() || !compat::kTellsOfWrites) {
          chosen.mul_(0.5);
          break;
        }
        auto* const values = chosen.data_ptr<float>();
        for (int64_t i = 0; i < chosen.numel(); i++) values[i] *= 0.5F;
        break;
      }
      case Move::FreezeMember:
        weight.set_requires_grad(!weight.requires_grad());
        break;
      case Move::FreezeParameter:
        frozen.set_requires_grad(!frozen.requires_grad());
        break;
      case Move::SecondOptimizer: {
        std::vector<at::Tensor> some(parameters.begin(), parameters.begin() + static_cast<int64_t>(parameters.size() + 1) / 2);
        if (!keeps_gradients) break;
        if (!second) second = std::make_unique<torch::optim::SGD>(some, torch::optim::SGDOptions(0.05));
        second->step();
        break;
      }
      case Move::None:
      case Move::Count:
        break;
    }
  }
};

// An eps so large that a step does not depend on how a gradient of nearly zero is rounded.
constexpr double kEps = 1e-3;

/// Tessera's AdamW, which steps in backward where the parameters are sharded.
struct InBackward final : torch::optim::Optimizer {
  optim::AdamW own;
  explicit InBackward(const std::vector<at::Tensor>& parameters)
      : Optimizer(parameters, std::make_unique<torch::optim::AdamWOptions>()), own(parameters, {.lr = 1e-2, .eps = kEps}) {
    if (shard_info(parameters.front())) own.step_in_backward();
  }
  at::Tensor step(LossClosure /*closure*/) override {
    own.step();
    return {};
  }
};

/// How a model is sharded.
struct Way {
  ShardOptions options{.mesh = self_world()};  // all options except the mesh
  int ranks, replicas;
  std::vector<int> host_of;  // empty: one host
  bool moves_dims, divides, reshards_after_backward, has_lists, replicates_scale, by_policy;
  unsigned units;  // a bit for each layer

  explicit Way(Random& lot)
      : ranks(1 + static_cast<int>(lot() % 6)),
        moves_dims(lot() % 3 == 0),
        divides(lot() % 3 == 0),
        reshards_after_backward(lot() % 3 != 0),
        has_lists(lot() % 4 == 0),
        by_policy(lot() % 3 == 0),
        units(static_cast<unsigned>(lot())) {
    const auto one_of = [&](auto... values) {
      const std::common_type_t<decltype(values)...> all[] = {values...};
      return all[lot() % sizeof...(values)];
    };
    replicas = lot() % 3 == 0 ? divisor(ranks, lot) : 1;
    const auto groups = ReshardAfterForward(divisor(ranks / replicas, lot));
    options.residence = one_of(Residence::Auto, Residence::Auto, Residence::Gathered);
    options.layout = moves_dims ? Layout::Rows : one_of(Layout::Auto, Layout::Flat, Layout::Rows, Layout::WholeParameters);
    if (options.layout == Layout::Flat) options.shard_size_multiple = one_of(1, 3, 128);
    options.schedule.max_live_units = one_of(1, 2, 3);
    options.reshard_after_forward = one_of(ReshardAfterForward(), ReshardAfterForward(true), ReshardAfterForward(false), groups);
    options.schedule.backward_prefetch = one_of(BackwardPrefetch::Pre, BackwardPrefetch::Post, BackwardPrefetch::None);
    options.schedule.forward_prefetch = lot() % 3 != 0;
    options.schedule.prefetch_depth = one_of(1, 2, 3);
    options.schedule.limit_all_gathers = lot() % 3 != 0;
    options.schedule.unused_parameters = lot() % 3 == 0 ? UnusedParameters::Zeros : UnusedParameters::Refuse;
    // All ranks have to gather a unit, so only where nothing is gathered may a rank leave one out.
    if (options.schedule.unused_parameters == UnusedParameters::Zeros && lot() % 2 == 0 && on_cpu())
      options.residence = Residence::NodeShared;
    // On such meshes, divide factors round differently from the mean over the axes.
    if (replicas > 1 && !std::has_single_bit(static_cast<unsigned>(ranks))) divides = false;
    replicates_scale = replicas == 1 && lot() % 4 == 0;
    // Groups along the axes of a mesh may add in different orders if hosts cut through them.
    if (replicas == 1 && lot() % 3 == 0 && !ranks_differ()) {
      for (int rank = 0; rank < ranks; rank++) host_of.push_back(static_cast<int>(lot() % 3));
      if (lot() % 2 == 0 && on_cpu()) options.residence = Residence::NodeShared;
      // Only where some hosts have several ranks, but not one has all, is there a second level.
      const Topology topology(host_of);
      if (topology.hosts() == 1 || topology.hosts() == ranks) host_of.clear();
      if (host_of.empty() && options.residence == Residence::NodeShared) options.residence = Residence::Auto;
    }
  }

  static int divisor(int number, Random& lot) {
    while (true) {
      const int drawn = 1 + static_cast<int>(lot() % static_cast<unsigned>(number));
      if (number % drawn == 0) return drawn;
    }
  }

  bool ranks_differ() const { return options.residence == Residence::NodeShared && host_of.empty(); }

  void shard(const std::shared_ptr<Drawn>& model, const Communicator& world) const {
    auto chosen = options;
    chosen.mesh = replicas > 1 ? Mesh(world, {.replicate = replicas, .shard = ranks / replicas}) : Mesh(world);
    if (moves_dims) {
      // In the replicated model, columns of weights are together in memory. Here rows are, until shard_dim changes that.
      for (const auto& layer : model->layers) layer->weight.set_data(layer->weight.detach().contiguous());
      chosen.shard_dim = [columns = model->transposed](const std::string& /*name*/, const at::Tensor& parameter) -> std::optional<int64_t> {
        if (parameter.dim() < 2) return {};
        return std::ranges::any_of(columns, [&](const at::Tensor& weight) { return weight.is_same(parameter); }) ? 1 : 0;
      };
    }
    std::vector<std::shared_ptr<torch::nn::Module>> units_below;
    for (size_t i = 0; i < model->layers.size(); i++) {
      if ((units >> i) % 2 == 0) units_below.push_back(model->layers[i].ptr());
    }
    if (!by_policy) {
      for (const auto& layer : units_below) fully_shard(layer, chosen);
    }
    if (replicates_scale) chosen.replicated = {model->scale};
    if (by_policy) {
      const auto is_unit = [&](const ModuleInfo& info) {
        return std::ranges::any_of(units_below, [&](const auto& layer) { return layer.get() == &info.module; });
      };
      fully_shard(model, chosen, WrapPolicy{.chooses = is_unit});
    } else {
      fully_shard(model, chosen);
    }
    if (divides) set_gradient_divide_factors(*model, default_divide_factors(ranks));
    if (!reshards_after_backward) set_reshard_after_backward(*model, ReshardAfterBackward::No);
    if (has_lists && !units_below.empty()) {
      set_modules_to_forward_prefetch(*units_below.front(), units_below);
      set_modules_to_backward_prefetch(*units_below.back(), units_below);
    }
  }
};

void compare(unsigned seed) {
  SCOPED_TRACE("seed " + std::to_string(seed));
  Random lot(seed * 7919 + 1);
  const Way way(lot);
  const bool adam = lot() % 2 == 0, in_backward = adam && lot() % 2 == 0;
  Passes passes{.replicas = way.replicas, .unused = way.options.schedule.unused_parameters, .host_of = way.host_of};
  if (!in_backward && lot() % 2 == 0) {
    passes.count = 2 + static_cast<int>(lot() % 2);
    passes.meets = static_cast<Meets>(lot() % 4);
    if (passes.replicas == 1 && passes.meets == Meets::ShardGroupInEachPass) passes.meets = Meets::InTheLastPass;
  }
  const auto optimizer = [=](std::vector<at::Tensor> parameters) -> std::unique_ptr<torch::optim::Optimizer> {
    if (in_backward) return std::make_unique<InBackward>(parameters);
    if (adam) return std::make_unique<torch::optim::AdamW>(parameters, torch::optim::AdamWOptions(1e-2).eps(kEps));
    return std::make_unique<torch::optim::SGD>(parameters, torch::optim::SGDOptions(0.05).momentum(0.5));
  };
  const auto shard = [&](const std::shared_ptr<TrainedModel>& model, const Communicator& world) {
    way.shard(std::dynamic_pointer_cast<Drawn>(model), world);
  };
  const auto make = [&] { return std::make_shared<Drawn>(seed, !in_backward, way.ranks_differ()); };
  // A GPU's products depend on where their operands lie.
  EXPECT_NO_THROW(expect_parity(way.ranks, make, optimizer, 9, shard, passes, /*tolerance=*/on_cpu() ? 0 : 1e-3));
}

TEST(Property, DrawnModelsTrainLikeReplicatedOnes) {
  // A few seconds of the first models, or what TESSERA_PROPERTY_SECONDS and TESSERA_PROPERTY_FIRST say.
  const auto seconds = env_int("TESSERA_PROPERTY_SECONDS", 1, 100'000).value_or(8);
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(seconds);
  const auto first = static_cast<unsigned>(env_int("TESSERA_PROPERTY_FIRST", 0, 1'000'000'000).value_or(0));
  unsigned seed = first;
  while (std::chrono::steady_clock::now() < end && !::testing::Test::HasFailure()) compare(seed++);
  RecordProperty("models", static_cast<int>(seed - first));
  std::printf("%u models\n", seed - first);
}

}  // namespace
}  // namespace tessera::testing::property_test
