// Tests of runs of several models: each trains as in plain libtorch, and resumes from a checkpoint with the same bits.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/average.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::several_models_test {
namespace {

namespace nn = torch::nn;
using checkpoint::Contents;
using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kRate = 0.05, kDecay = 0.75;

/// Returns the loss of this rank or, for plain models, the mean loss of all ranks.
using LossOf = std::function<at::Tensor(const std::function<at::Tensor(int rank)>& loss)>;
using State = std::map<std::string, at::Tensor>;

/// libtorch's Adam for plain modules, and Tessera's for sharded ones.
class Adam {
 public:
  Adam(const nn::Module& module, bool is_sharded) {
    if (is_sharded) {
      own_ = std::make_unique<optim::Adam>(parameters(module), optim::AdamOptions{.lr = kRate});
    } else {
      torch_ = std::make_unique<torch::optim::Adam>(module.parameters(), torch::optim::AdamOptions(kRate));
    }
  }
  void step() { own_ ? own_->step() : (torch_->step(), void()); }
  void zero_grad() { own_ ? own_->zero_grad() : torch_->zero_grad(); }
  optim::Optimizer* own() const { return own_.get(); }

 private:
  std::unique_ptr<optim::Adam> own_;
  std::unique_ptr<torch::optim::Adam> torch_;
};

State state_of(const nn::Module& module, const Communicator* world) {
  State state;
  if (world != nullptr) return full_state(module);
  for (const auto& item : module.named_parameters()) state[item.key()] = item.value().detach();
  return state;
}

/// Two models that train in turn, each with its own optimizer, in one checkpoint.
class Gan {
 public:
  explicit Gan(const Communicator* world, const Folder&)
      : world_(world),
        for_generator_(*shard(both_->generator.ptr()), world),
        for_discriminator_(*shard(both_->discriminator.ptr()), world) {}

  void step(int number, const LossOf& loss_of) {
    loss_of([&](int rank) {
      const auto x = input(rank + number);
      return at::softplus(-judge(x.slice(1, 0, 4))).mean() + at::softplus(judge(both_->generator->forward(x).detach())).mean();
    }).backward();
    for_discriminator_.step();
    for_discriminator_.zero_grad();
    loss_of([&](int rank) { return at::softplus(-judge(both_->generator->forward(input(rank + number)))).mean(); }).backward();
    for_generator_.step();
    for_generator_.zero_grad();
    for_discriminator_.zero_grad();
  }
  State state() const { return state_of(*both_, world_); }
  Contents contents() { return {.model = both_.get(), .optimizer = {for_generator_.own(), for_discriminator_.own()}}; }

 private:
  struct Both : nn::Module {
    Net generator;
    nn::Sequential discriminator{nn::Linear(4, 8), nn::Tanh(), nn::Linear(8, 1)};
    Both() {
      register_module("generator", generator);
      register_module("discriminator", discriminator);
      fill_with_numbers(*this);  // the ranks share the random generator
    }
  };
  template <class M>
  std::shared_ptr<M> shard(std::shared_ptr<M> module) const {
    if (world_ != nullptr) fully_shard(module, {.mesh = *world_});
    return module;
  }
  at::Tensor judge(const at::Tensor& x) { return both_->discriminator->forward(x); }

  const Communicator* world_;
  std::shared_ptr<Both> both_ = std::make_shared<Both>();
  Adam for_generator_, for_discriminator_;
};

/// A student, and a teacher that is its average.
class MeanTeacher {
 public:
  explicit MeanTeacher(const Communicator* world, const Folder&) : world_(world), student_(sharded(world)), optimizer_(*student_, world) {
    if (world != nullptr) average_ = std::make_unique<optim::Average>(student_.ptr(), optim::AverageOptions{.decay = kDecay});
  }

  void step(int number, const LossOf& loss_of) {
    loss_of([&](int rank) {
      const auto x = input(rank + number);
      const auto wanted = taught(x);
      return (student_->forward(x) - wanted).pow(2).mean() + student_->forward(x * 2).pow(2).mean();
    }).backward();
    optimizer_.step();
    optimizer_.zero_grad();
    if (average_) return average_->update();
    torch::NoGradGuard no_grad;
    for (size_t i = 0; i < teacher_->parameters().size(); i++) teacher_->parameters()[i].lerp_(student_->parameters()[i], 1 - kDecay);
  }
  State state() const {
    auto result = state_of(*student_, world_);
    const auto swapped = average_ ? std::optional<optim::Average::Swapped>(std::in_place, *average_) : std::nullopt;
    for (const auto& [name, values] : state_of(average_ ? *student_ : *teacher_, world_)) result["teacher." + name] = values;
    return result;
  }
  Contents contents() { return {.model = student_.get(), .optimizer = optimizer_.own(), .average = average_.get()}; }

 private:
  static Net sharded(const Communicator* world) {
    auto net = seeded_net();
    if (world == nullptr) return net;
    fully_shard(net->b, {.mesh = *world});
    fully_shard(net, {.mesh = *world});
    return net;
  }
  at::Tensor taught(const at::Tensor& x) {
    torch::NoGradGuard no_grad;
    if (!average_) return teacher_->forward(x);
    const auto swapped = average_->swapped();
    return student_->forward(x);
  }

  const Communicator* world_;
  Net student_, teacher_ = seeded_net();
  Adam optimizer_;
  std::unique_ptr<optim::Average> average_;
};

/// A policy that must stay near a frozen reference, which has the initial weights of the policy.
class FrozenReference {
 public:
  FrozenReference(const Communicator* world, const Folder& folder) : world_(world), policy_(seeded_net()), reference_(seeded_net()) {
    for (auto& parameter : reference_->parameters()) parameter.requires_grad_(false);
    if (world == nullptr) return;
    fully_shard(policy_, {.mesh = *world});
    const auto start = folder / "start";
    if (!std::filesystem::exists(start / "manifest.json")) checkpoint::save(start, {.model = policy_.get()}, *world);
    fully_shard(reference_, {.mesh = *world, .start = Start::Loaded});
    checkpoint::load_weights(*reference_, start);
  }

  void step(int number, const LossOf& loss_of) {
    loss_of([&](int rank) {
      const auto x = input(rank + number);
      const auto wanted = [&] {
        torch::NoGradGuard no_grad;
        return reference_->forward(x).softmax(-1);
      }();
      const auto scores = policy_->forward(x);
      return at::kl_div(scores.log_softmax(-1), wanted, at::Reduction::Sum) + scores.pow(2).mean();
    }).backward();
    for (const auto& parameter : reference_->parameters()) EXPECT_FALSE(parameter.grad().defined());
    optimizer().step();
    optimizer().zero_grad();
  }
  State state() const {
    auto result = state_of(*policy_, world_);
    for (const auto& [name, values] : state_of(*reference_, world_)) result["reference." + name] = values;
    return result;
  }
  Contents contents() { return {.model = policy_.get(), .optimizer = optimizer().own()}; }

 private:
  Adam& optimizer() {
    if (!optimizer_) optimizer_.emplace(*policy_, world_);
    return *optimizer_;
  }

  const Communicator* world_;
  Net policy_, reference_;
  std::optional<Adam> optimizer_;
};

template <class Run>
class SeveralModels : public ::testing::Test {};
using Runs = ::testing::Types<Gan, MeanTeacher, FrozenReference>;
TYPED_TEST_SUITE(SeveralModels, Runs);

TYPED_TEST(SeveralModels, TrainAsPlainOnesAndGoOn) {
  constexpr int kRanks = 3;
  const Folder folder;
  TypeParam plain(nullptr, folder);
  for (int step = 0; step < 5; step++) {
    plain.step(step, [](const auto& loss) {
      auto sum = loss(0);
      for (int rank = 1; rank < kRanks; rank++) sum = sum + loss(rank);
      return sum / kRanks;
    });
  }
  State saved;
  with_ranks(kRanks, [&](const Communicator& world) {
    const LossOf own = [&](const auto& loss) { return loss(world.rank()); };
    TypeParam run(&world, folder);
    for (int step = 0; step < 3; step++) run.step(step, own);
    checkpoint::save(folder / "run", run.contents(), world);
    auto state = run.state();
    if (world.is_first()) saved = std::move(state);
    for (int step = 3; step < 5; step++) run.step(step, own);
    const auto trained = run.state();
    for (const auto& [name, values] : plain.state()) EXPECT_TRUE(at::allclose(trained.at(name), values, 1e-4, 1e-6)) << name;

    TypeParam resumed(&world, folder);
    for (int step = 0; step < 1; step++) resumed.step(step, own);  // so the checkpoint has to replace other values
    auto contents = resumed.contents();
    checkpoint::load(folder / "run", contents, world);
    for (int step = 3; step < 5; step++) resumed.step(step, own);
    for (const auto& [name, values] : resumed.state()) EXPECT_TRUE(at::equal(trained.at(name), values)) << name;
  });
  with_ranks(2, [&](const Communicator& world) {
    TypeParam resumed(&world, folder);
    auto contents = resumed.contents();
    checkpoint::load(folder / "run", contents, world);
    for (const auto& [name, values] : resumed.state()) EXPECT_TRUE(at::equal(saved.at(name), values)) << name;
  });
}

/// Expects that no initial values are drawn for parameters that a checkpoint replaces.
template <class Optimizer>
void expect_resumption_into_a_model_without_values(const std::function<std::unique_ptr<Optimizer>(Net&)>& make_optimizer) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto train = [&](Net& net, Optimizer& optimizer, optim::Average& average) {
      net->forward(input(world.rank())).pow(2).sum().backward();
      optimizer.step();
      optimizer.zero_grad();
      average.update();
    };
    auto net = sharded_net(world);
    const auto optimizer = make_optimizer(net);
    optim::Average average(net.ptr());
    train(net, *optimizer, average);
    checkpoint::save(folder / "a", {.model = net.get(), .optimizer = optimizer.get(), .average = &average}, world);
    train(net, *optimizer, average);

    auto fresh = deferred_init([] { return Net(); });
    for (const auto& child : fresh->children()) fully_shard(child, {.mesh = world, .start = Start::Loaded});
    const auto resumed = make_optimizer(fresh);
    optim::Average resumed_average(fresh.ptr());
    EXPECT_THAT(message_of<UsageError>([&] { resumed_average.update(); }), HasSubstr("Average::update needs the values of 'a."));
    Contents contents{.model = fresh.get(), .optimizer = resumed.get(), .average = &resumed_average};
    checkpoint::load(folder / "a", contents, world);
    train(fresh, *resumed, resumed_average);
    for (const bool averaged : {false, true}) {
      const auto swapped = averaged ? std::optional<optim::Average::Swapped>(std::in_place, average) : std::nullopt;
      const auto also = averaged ? std::optional<optim::Average::Swapped>(std::in_place, resumed_average) : std::nullopt;
      for (const auto& [name, values] : full_state(*net)) EXPECT_TRUE(at::equal(full_state(*fresh)[name], values)) << name;
    }
  });
}

TEST(Resumption, NeedsNoValuesBefore) {
  expect_resumption_into_a_model_without_values<optim::Optimizer>(
      [](Net& net) { return std::make_unique<optim::Adam>(parameters(*net), optim::AdamOptions{.lr = kRate}); });
  expect_resumption_into_a_model_without_values<torch::optim::Optimizer>(
      [](Net& net) { return std::make_unique<torch::optim::Adam>(net->parameters(), torch::optim::AdamOptions(kRate)); });
}

TEST(SeveralModels, AreRefusedByNameIfTheyDoNotFit) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    optim::Adam adam(parameters(*net->a), {.lr = kRate}), again(parameters(*net), {.lr = kRate});
    optim::SGD sgd(parameters(*net->b), {.lr = kRate});
    optim::Average average(net.ptr());
    const auto refused = [&](const std::function<Contents()>& contents) {
      return message_of<UsageError>([&] { checkpoint::save(folder / "a", contents(), world); });
    };
    EXPECT_THAT(refused([&] { return Contents{.model = net.get(), .optimizer = {&adam, &sgd}}; }),
                HasSubstr("one class of optimizers, but was given a tessera::optim::Adam and a tessera::optim::SGD"));
    EXPECT_THAT(refused([&] { return Contents{.model = net.get(), .average = &average}; }), HasSubstr("give Contents::optimizer"));
    EXPECT_THAT(refused([&] { return Contents{.model = net->a.get(), .optimizer = &adam, .average = &average}; }),
                HasSubstr("the average is of parameters that the model of the checkpoint does not have"));
    net->forward(input(world.rank())).sum().backward();
    adam.step();
    again.step();
    EXPECT_THAT(refused([&] { return Contents{.model = net.get(), .optimizer = {&adam, &again}}; }),
                HasSubstr("two optimizers have state of the parameter 'a."));
    Contents contents{.model = net.get(), .optimizer = &again};
    checkpoint::save(folder / "b", contents, world);
    contents.average = &average;
    EXPECT_THAT(
        message_of<UsageError>([&] { checkpoint::load(folder / "b", contents, world); }),
        AllOf(HasSubstr("the checkpoint " + (folder / "b").string() + ": it has no average of 'a.bias'"), HasSubstr("resume without one")));
    checkpoint::save(folder / "c", contents, world);
    {
      const auto swapped = average.swapped();
      EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "d", contents, world); }),
                  HasSubstr("save after swapped() has ended"));
      checkpoint::load(folder / "c", contents, world);  // the model and the average are as they were
    }
    average.update();
    contents.average = nullptr;
    checkpoint::load(folder / "c", contents, world);
  });
}

}  // namespace
}  // namespace tessera::testing::several_models_test
