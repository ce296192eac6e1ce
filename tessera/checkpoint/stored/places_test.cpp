// The model and the optimizer are found in checkpoints of other programs, under keys of any name, and told apart from similar names.
#include "tessera/checkpoint/stored/places.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::places_test {
namespace {

using checkpoint::Format;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using State = std::map<std::string, at::Tensor>;

checkpoint::StoredTensor tensor_of_numbers(std::vector<int64_t> shape) {
  const auto strides = c10::contiguous_strides(shape);
  return {.dtype = at::kFloat, .shape = shape, .boxes = {{.box = whole_slice(shape), .strides = {strides.begin(), strides.end()}}}};
}

TEST(Places, AreFoundUnderTheNamesOfOthers) {
  const auto names = [](const checkpoint::Manifest& run) {
    std::vector<std::string> result;
    for (const auto& [name, tensor] : run.catalog.tensors) result.push_back(name);
    return result;
  };
  checkpoint::Catalog catalog;
  const auto one = tensor_of_numbers({2});
  catalog.tensors = {{"model.a.w", one}, {"optimizer.state.a.w.exp_avg", one}, {"ema.a.w", one}};
  catalog.values = {{"optimizer.param_groups.a.w.lr", 0.5}, {"optimizer.param_groups.b.w.lr", 0.5}, {"epoch", 3}};
  auto run = checkpoint::run_of(catalog);  // flattened, as flatten_optimizer_state_dict has it
  EXPECT_THAT(names(run), UnorderedElementsAre("a.w", "optimizer.a.w.exp_avg", ".tensors.ema.a.w"));
  EXPECT_EQ(run.optimizer, "an optimizer of PyTorch");
  EXPECT_EQ(run.notes.front().at("epoch"), "3");
  EXPECT_EQ(run.notes.front().at("optimizer.param_groups"), R"([{"lr":0.5,"params":["a.w","b.w"]}])");
  EXPECT_THAT(names_beside(run), UnorderedElementsAre("ema.a.w"));

  catalog = {};
  catalog.tensors = {{"model_state_dict.w", one}, {"optimizer_state_dict.state.0.momentum_buffer", one}};
  catalog.values = {{"optimizer_state_dict.param_groups.0.params", {0}}, {"optimizer_state_dict.state.1.momentum_buffer", nullptr}};
  run = checkpoint::run_of(catalog);
  EXPECT_THAT(names(run), UnorderedElementsAre("w"));
  EXPECT_TRUE(run.optimizer.empty());
  EXPECT_THAT(run.catalog.left_out.at("optimizer.state"), HasSubstr("by numbers only"));
  catalog.values["optimizer_state_dict.param_groups.0.param_names"] = {"w"};
  EXPECT_THAT(names(checkpoint::run_of(catalog)), UnorderedElementsAre("w", "optimizer.w.momentum_buffer"));

  catalog = {};
  catalog.tensors = {{"model.w", one}, {"head.w", one}};  // a model with a part that is called "model"
  catalog.aliases = {{"tied", "head.w"}};
  run = checkpoint::run_of(catalog);
  EXPECT_THAT(names(run), UnorderedElementsAre("model.w", "head.w"));
  EXPECT_EQ(run.catalog.aliases.at("tied"), "head.w");
  EXPECT_TRUE(run.optimizer.empty());
}

TEST(Places, AreFoundUnderKeysOfAnyNames) {
  const auto one = tensor_of_numbers({2});
  struct Case {
    const char *model, *optimizer;
  };
  for (const auto& [model, optimizer] : {Case{"app.model.", "app.optim."}, Case{"state.model.", "state.optimizer."}, Case{"net.", "opt."},
                                         Case{"app.net.", "app.opt."}, Case{"weights.", "optimizer."}, Case{"app.", "app.optim."},
                                         Case{"", "optim."}, Case{"model.module.", "optimizer."}, Case{"a.b.c.", "a.b.o."}}) {
    for (const bool settings : {true, false}) {
      SCOPED_TRACE(fmt::format("{} {} {}", model, optimizer, settings));
      const auto key = [](const char* before, const char* name) { return std::string(before) + name; };
      checkpoint::Catalog catalog;
      catalog.tensors = {{key(model, "a.w"), one},
                         {key(model, "state.w"), one},
                         {key(optimizer, "state.a.w.exp_avg"), one},
                         {key(optimizer, "state.state.w.exp_avg"), one}};
      if (settings) catalog.values = {{key(optimizer, "param_groups.0.lr"), 0.5}, {key(optimizer, "param_groups.0.params"), {"a.w", "state.w"}}};
      const auto run = checkpoint::run_of(catalog);
      std::vector<std::string> names;
      for (const auto& [name, tensor] : run.catalog.tensors) names.push_back(name);
      EXPECT_THAT(names, UnorderedElementsAre("a.w", "state.w", "optimizer.a.w.exp_avg", "optimizer.state.w.exp_avg"));
      EXPECT_FALSE(run.optimizer.empty());
      EXPECT_TRUE(run.catalog.left_out.empty());
    }
  }
  checkpoint::Catalog several;
  several.tensors = {{"g.w", one}, {"d.w", one}, {"opt_g.state.w.exp_avg", one}, {"opt_d.state.w.exp_avg", one}};
  const auto run = checkpoint::run_of(several);
  EXPECT_TRUE(run.catalog.tensors.contains("g.w") && run.catalog.tensors.contains("d.w"));
  EXPECT_EQ(run.catalog.tensors.size(), 2U);
  EXPECT_THAT(run.catalog.left_out.at("optimizer.state"), HasSubstr("one of several optimizers"));
}

// Buffers may have names like an optimizer's state, and two parts of a model may have the same names.
TEST(Places, AreNotGuessed) {
  const auto one = tensor_of_numbers({2});
  checkpoint::Catalog weights;
  weights.tensors = {{"layer.w", one}, {"normalizer.state.sum", one}, {"counter.state.0.step", one}};
  const checkpoint::ModelNames known{.all = {"layer.w", "normalizer.state.sum", "counter.state.0.step"}, .parameters = {{"layer.w"}}};
  auto run = checkpoint::run_of(weights, known);
  EXPECT_EQ(run.catalog.tensors.size(), 3U);
  EXPECT_TRUE(run.optimizer.empty() && run.catalog.left_out.empty());
  weights.tensors.erase("counter.state.0.step");
  run = checkpoint::run_of(weights);
  EXPECT_TRUE(run.catalog.tensors.contains("normalizer.state.sum") && run.catalog.left_out.empty());
  weights.tensors["optimizer.state.sum"] = one;
  EXPECT_THAT(checkpoint::run_of(weights).catalog.left_out.at("optimizer.state.sum"), HasSubstr("state of no parameter"));

  checkpoint::Catalog two;
  two.tensors = {{"model.a.w", one}, {"model.a.v", one}, {"model.b.w", one}, {"optimizer.state.a.w.exp_avg", one}};
  const checkpoint::ModelNames b{.all = {"w", "v", "scale"}, .parameters = {{"w"}, {"v"}, {"scale"}}};
  EXPECT_TRUE(checkpoint::run_of(two, b).catalog.tensors.contains("a.w"));  // not "w", because no key has all three parameters
  const checkpoint::ModelNames tied{.all = {"w", "head", "v"}, .parameters = {{"w", "head"}, {"v"}}};
  EXPECT_TRUE(checkpoint::run_of(two, tied).catalog.tensors.contains("v"));
}

// Most models of the Hub call their trunk "model", and a tied head is not stored.
TEST(Places, OfWeightsAloneKeepTheirNames) {
  const Folder folder;
  struct Trunk : torch::nn::Module {
    torch::nn::Linear model = register_module("model", torch::nn::Linear(2, 2));
  };
  const auto trunk = std::make_shared<Trunk>();
  fill_with_numbers(*trunk);
  with_ranks(1, [&](const Communicator& world) { checkpoint::save(folder / "a", {.model = trunk.get()}, world); });
  for (const auto to : {Format::Hub, Format::Safetensors}) {
    const auto out = folder / fmt::format("{}", static_cast<int>(to)), again = folder / fmt::format("{}-again", static_cast<int>(to));
    checkpoint::convert(folder / "a", out, {.to = to});
    checkpoint::convert(out, again, {.to = to, .dtype = at::kBFloat16});
    EXPECT_TRUE(checkpoint::read_catalog(again).tensors.contains("model.weight"));
    Trunk other;
    checkpoint::load_weights(other, again);
    EXPECT_TRUE(at::allclose(other.model->weight, trunk->model->weight, 1e-2));
  }
}

/// Parts with the names that checkpoints have for other things.
struct LookAlikes : torch::nn::Module {
  torch::nn::Linear optimizer = register_module("optimizer", torch::nn::Linear(3, 2)), model = register_module("model", torch::nn::Linear(2, 3));
  struct Generator : torch::nn::Module {
    at::Tensor cpu = register_parameter("cpu", at::arange(6, at::kFloat).view({3, 2}));
  };
  std::shared_ptr<Generator> generator = register_module("generator", std::make_shared<Generator>());
  at::Tensor header = register_parameter("header", at::ones({3}));
  LookAlikes() { fill_with_numbers(*this); }
  at::Tensor forward(const at::Tensor& x) { return model(torch::tanh(optimizer(x * header).mm(generator->cpu.t()).mm(generator->cpu))); }
};

TEST(Places, TellPartsOfAModelFromWhatIsBesideIt) {
  const Folder folder;
  const auto train = [](LookAlikes& model, optim::Optimizer& optimizer) {
    model.forward(numbers({4, 3})).pow(2).mean().backward();
    optimizer.step();
    optimizer.zero_grad();
  };
  State before, after;
  with_ranks(2, [&](const Communicator& world) {
    const auto model = std::make_shared<LookAlikes>();
    fully_shard(model, {.mesh = world});
    optim::SGD optimizer(parameters(*model), {.lr = 0.1, .momentum = 0.9});
    train(*model, optimizer);
    checkpoint::save(folder / "a", {.model = model.get(), .optimizer = &optimizer}, world);
    auto state = full_state(*model);
    train(*model, optimizer);
    auto next = full_state(*model);
    if (world.is_first()) before = std::move(state), after = std::move(next);
  });
  for (const auto to : {Format::Tessera, Format::Dcp, Format::Accelerate, Format::Torch, Format::Safetensors, Format::Hub}) {
    const auto out = folder / fmt::format("b{}{}", static_cast<int>(to), to == Format::Torch ? ".pt" : "");
    const bool weights_only = to == Format::Safetensors || to == Format::Hub;
    checkpoint::ConvertOptions options{.to = to, .world = to == Format::Torch || weights_only ? 1 : 2};
    if (to != Format::Tessera && !weights_only) options.settings = {{"lr", 0.1}, {"momentum", 0.9}};
    checkpoint::convert(folder / "a", out, options);
    SCOPED_TRACE(out.string());
    with_ranks(2, [&](const Communicator& world) {
      const auto model = std::make_shared<LookAlikes>();
      fully_shard(model, {.mesh = world});
      checkpoint::load_weights(*model, out);
      expect_same(full_state(*model), before);
      if (weights_only) return;
      optim::SGD optimizer(parameters(*model), {.lr = 0.1, .momentum = 0.9});
      checkpoint::Contents contents{.model = model.get(), .optimizer = &optimizer};
      checkpoint::load(out, contents, world);
      EXPECT_EQ(checkpoint::read_run(out).generator.empty(), to == Format::Torch);  // the format has no generators
      train(*model, optimizer);
      expect_same(full_state(*model), after);
    });
  }
  struct Odd : torch::nn::Module {
    at::Tensor w = register_parameter("__metadata__", at::ones({3}));
  };
  with_ranks(2, [&](const Communicator& world) {
    const auto model = std::make_shared<Odd>();
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(message_of<Error>([&] { checkpoint::save(folder / "odd", {.model = model.get()}, world); }), HasSubstr("the tensor '__metadata__' can't be saved"));
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "odd"));
}

}  // namespace
}  // namespace tessera::testing::places_test
