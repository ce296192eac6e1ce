// Quantized weights have the bits of bitsandbytes, in files, in memory and on ranks.
#include "tessera/nn/quantize.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tessera/base/dynamic_code.h"
#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/nn/lora.h"
#include "tessera/optim/adam.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/weight_operator.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/allocations.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::quantize_test {
namespace {

using namespace checkpoint;  // NOLINT(google-build-using-namespace)
using nn::Quantization;
using ::testing::HasSubstr;

constexpr Quantization kAll[] = {Quantization::Nf4, Quantization::Nf4Single, Quantization::Int8, Quantization::Fp8};

/// Returns the bytes of one kind from all blocks, one block after the other, cut to `numel`.
at::Tensor of_blocks(const at::Tensor& held, int64_t begin, int64_t bytes, int64_t numel) {
  return held.narrow(1, begin, bytes).contiguous().view({-1}).narrow(0, 0, numel);
}

struct Made : Folder, Ended {
  Made() : Ended(run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/quantize_files.py", *this / "file.safetensors"})) {}
};
/// Returns the file that bitsandbytes has made, once for all tests.
const Made& of_bitsandbytes() {
  static const Made made;
  return made;
}

TEST(Quantize, HasTheBitsOfBitsandbytes) {
  const auto& made = of_bitsandbytes();
  if (made.status == kNoPackage) GTEST_SKIP() << "build/python has no package bitsandbytes";
  ASSERT_EQ(made.status, 0) << made.output;
  const SafetensorsFile file(made / "file.safetensors");
  for (const std::string name : {"square", "odd", "wide", "zeros", "narrow"}) {
    const auto weight = file.read(name);
    const auto blocks = (weight.numel() + 63) / 64;
    for (const auto kind : {Quantization::Nf4, Quantization::Nf4Single}) {
      const auto prefix = fmt::format("{}.{}.", name, name_of(kind));
      SCOPED_TRACE(prefix);
      const auto held = nn::quantized(kind, weight);
      const bool nested = kind == Quantization::Nf4;
      const auto codes = file.read(prefix + "codes");
      EXPECT_TRUE(at::equal(of_blocks(held, 0, nested ? 8192 : 32, codes.numel()), codes));
      const auto scales = file.read(prefix + "scales");
      if (nested) {
        EXPECT_TRUE(at::equal(of_blocks(held, 8192, 256, blocks), scales));
        EXPECT_TRUE(at::equal(held.narrow(1, 8448, 4).contiguous().view(at::kFloat).view({-1}), file.read(prefix + "nested")));
      } else {
        EXPECT_TRUE(at::equal(held.narrow(1, 32, 4).contiguous().view(at::kFloat).view({-1}), scales));
      }
      EXPECT_TRUE(at::equal(nn::dequantized(kind, held, weight.sizes(), weight.scalar_type()), file.read(prefix + "values")));
    }
  }
  const auto values = file.read("dynamic");
  for (const std::string name : {"signed", "unsigned"}) {
    const auto& code = name == "signed" ? DynamicCode::of_signed() : DynamicCode::of_unsigned();
    const auto these = name == "signed" ? values : values.abs();
    const auto codes = at::zeros({values.numel()}, at::kByte);
    std::vector<float> scales;
    for (int64_t begin = 0; begin < values.numel(); begin += DynamicCode::kBlock) {
      const auto count = std::min(DynamicCode::kBlock, values.numel() - begin);
      scales.push_back(code.encode({these.const_data_ptr<float>() + begin, static_cast<size_t>(count)}, codes.mutable_data_ptr<uint8_t>() + begin));
    }
    EXPECT_TRUE(at::equal(codes, file.read("dynamic." + name + ".codes"))) << name;
    EXPECT_TRUE(at::equal(at::tensor(scales), file.read("dynamic." + name + ".scales"))) << name;
  }
}

TEST(AdamW8bit, HasTheBitsOfBitsandbytes) {
  const auto& made = of_bitsandbytes();
  if (made.status == kNoPackage) GTEST_SKIP() << "build/python has no package bitsandbytes";
  ASSERT_EQ(made.status, 0) << made.output;
  const SafetensorsFile file(made / "file.safetensors");
  for (const int ranks : {1, 2, 4}) {
    with_ranks(ranks, [&](const Communicator& world) {
      torch::nn::Linear layer(101, 50);
      {
        const torch::NoGradGuard no_grad;
        layer->weight.copy_(file.read("steps.weight"));
        layer->bias.copy_(file.read("steps.bias"));
      }
      fully_shard(layer, {.mesh = world});
      optim::AdamW8bit optimizer(parameters(*layer), {.lr = 0.01, .beta2 = 0.95, .weight_decay = 0.1});
      for (int step = 0; step < 10; step++) {
        const auto gradient = [&](const char* name) { return file.read(fmt::format("steps.{}.{}", name, step)); };
        ((layer->weight * gradient("weight")).sum() + (layer->bias * gradient("bias")).sum()).backward();
        optimizer.step();
        optimizer.zero_grad();
      }
      EXPECT_TRUE(at::equal(full_parameter(layer->weight), file.read("steps.weight.after")));
      EXPECT_TRUE(at::allclose(full_parameter(layer->bias), file.read("steps.bias.after"), 1e-6, 1e-6));
      const auto state = optimizer.state(*layer);
      const auto begin = shard_info(parameters(*layer).front())->begin;
      for (const auto& [ours, theirs] : {std::pair("exp_avg", "first"), std::pair("exp_avg_sq", "second")}) {
        const auto codes = state.at("weight").at(ours).flatten(), scales = state.at("weight").at(std::string(ours) + "_scales");
        EXPECT_TRUE(at::equal(codes, file.read(std::string("steps.") + theirs).narrow(0, begin, codes.numel()))) << ours;
        EXPECT_TRUE(at::equal(scales, file.read(fmt::format("steps.{}_scales", theirs)).narrow(0, begin / 256, scales.numel()))) << ours;
      }
    });
  }
}

TEST(Quantize, KeepsValuesToWithinTheirBlocks) {
  at::manual_seed(1);
  const auto weight = at::randn({50, 129});
  for (const auto kind : kAll) {
    const auto held = nn::quantized(kind, weight);
    EXPECT_EQ(static_cast<int64_t>(held.nbytes()), nn::held_bytes(kind, weight.numel()));
    const auto values = nn::dequantized(kind, held, weight.sizes(), at::kFloat);
    const double most = kind == Quantization::Int8 ? 0.02 : kind == Quantization::Fp8 ? 0.15 : 0.6;
    EXPECT_LT((values - weight).abs().max().item<double>(), most) << name_of(kind);
    EXPECT_TRUE(at::equal(nn::dequantized(kind, held, weight.sizes(), at::kBFloat16), values.to(at::kBFloat16))) << name_of(kind);
  }
}

TEST(Quantize, OfNoOutputsHasZerosAsGradients) {
  for (const auto kind : kAll) {
    torch::nn::Sequential net(torch::nn::Linear(4, 0));
    nn::quantize(net, {.quantization = kind});
    auto x = at::ones({2, 3, 4}).requires_grad_();
    net->forward(x).sum().backward();
    EXPECT_TRUE(at::equal(x.grad(), at::zeros_like(x))) << name_of(kind);
  }
}

struct BlockImpl : torch::nn::Module {
  torch::nn::Linear up = register_module("up", torch::nn::Linear(24, 40)), down = register_module("down", torch::nn::Linear(40, 24));
  at::Tensor forward(const at::Tensor& x) { return x + down(torch::relu(up(x))); }
};
TORCH_MODULE(Block);
struct NetImpl : torch::nn::Module {
  Block first = register_module("first", Block()), second = register_module("second", Block());
  torch::nn::Linear head = register_module("head", torch::nn::Linear(24, 3));
  at::Tensor forward(const at::Tensor& x) { return head(second(first(x))); }
};
TORCH_MODULE(Net);

/// Guards the generator, which ranks that are threads share.
std::mutex mutex;
template <class Make>
auto drawn(uint64_t seed, const Make& make) {
  const std::lock_guard lock(mutex);
  at::manual_seed(seed);
  return make();
}

Net seeded() {
  return drawn(3, [] { return Net(); });
}

at::Tensor some_input(int64_t rank = 0) {
  return drawn(100 + static_cast<uint64_t>(rank), [] { return at::randn({5, 24}); });
}

void add_adapters(Net& net) {
  drawn(5, [&] { lora::apply(net, {.r = 4}); });
}

/// Rounds weights to the values that this quantization can hold.
void round_weights(Net& net, Quantization kind) {
  const torch::NoGradGuard no_grad;
  for (auto& item : net->named_parameters()) {
    if (item.value().dim() != 2 || item.key().starts_with("head")) continue;
    item.value().copy_(nn::dequantized(kind, nn::quantized(kind, item.value()), item.value().sizes(), at::kFloat));
  }
}

Net rounded(Quantization kind) {
  auto net = seeded();
  round_weights(net, kind);
  return net;
}

std::vector<at::Tensor> losses_of(Net& net, int64_t rank, int steps) {
  optim::AdamW optimizer(parameters(*net), {.lr = 0.01});
  std::vector<at::Tensor> losses;
  for (int step = 0; step < steps; step++) {
    auto loss = net(some_input(rank)).pow(2).mean();
    losses.push_back(loss.detach());
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
  }
  return losses;
}

TEST(Quantize, TrainsAdaptersWithTheBitsOfTheRoundedBase) {
  for (const auto kind : kAll) {
    SCOPED_TRACE(name_of(kind));
    for (const int ranks : {1, 2, 3}) {
      with_ranks(ranks, [&](const Communicator& world) {
        const auto residence = kind == Quantization::Nf4Single || kind == Quantization::Fp8 ? Residence::Gathered : Residence::NodeShared;
        std::vector<std::vector<at::Tensor>> losses;
        for (const bool is_quantized : {false, true}) {
          auto net = is_quantized ? seeded() : rounded(kind);
          if (is_quantized) nn::quantize(net, {.quantization = kind});
          add_adapters(net);
          fully_shard(net, {.mesh = world, .residence = residence}, wrap_classes({"Block"}));
          losses.push_back(losses_of(net, world.rank(), 4));
        }
        for (size_t step = 0; step < losses[0].size(); step++) EXPECT_TRUE(at::equal(losses[0][step], losses[1][step])) << step;
      });
    }
  }
}

TEST(Quantize, IsAWeightToEveryOperator) {
  const auto plain = rounded(Quantization::Int8);
  auto net = seeded();
  nn::quantize(net, {.quantization = Quantization::Int8});
  const auto &weight = net->first->up->weight, &expected = plain->first->up->weight;
  EXPECT_EQ(weight.sizes(), expected.sizes());
  EXPECT_FALSE(weight.requires_grad());
  EXPECT_EQ(net->named_parameters()["first.up.weight"].scalar_type(), at::kByte);
  EXPECT_TRUE(at::equal(weight.norm(), expected.norm()));
  EXPECT_TRUE(at::equal(weight.t().contiguous(), expected.t()));
  EXPECT_TRUE(at::equal(weight[3], expected[3]));
  EXPECT_TRUE(at::equal(at::cat({weight, weight}), at::cat({expected, expected})));
  EXPECT_TRUE(at::equal(at::matmul(some_input(), weight.t()), at::matmul(some_input(), expected.t())));
  EXPECT_THAT(message_of<UsageError>([&] { at::Tensor(weight).zero_(); }), HasSubstr("held in another form"));
  EXPECT_ANY_THROW((void)weight.data_ptr());
}

TEST(Quantize, GoesThroughCheckpointsAndFilesOnAnyNumberOfRanks) {
  const Folder folder;
  const auto quantized_net = [](const Communicator& world, Start start) {
    auto net = start == Start::Loaded ? deferred_init([] { return seeded(); }) : seeded();
    nn::quantize(net);
    fully_shard(net, {.mesh = world, .start = start}, wrap_classes({"Block"}));
    return net;
  };
  auto expected = rounded(Quantization::Nf4);
  {
    const auto plain = seeded();
    std::vector<SafetensorsEntry> entries;
    for (const auto& item : plain->named_parameters())
      entries.push_back({.name = item.key(), .dtype = at::kFloat, .sizes = item.value().sizes().vec()});
    SafetensorsWriter writer(folder / "plain.safetensors", std::move(entries), {});
    for (const auto& item : plain->named_parameters()) writer.write(item.value().detach());
    writer.close();
  }
  with_ranks(2, [&](const Communicator& world) {
    auto net = quantized_net(world, Start::Equal);
    checkpoint::save(folder / "run", {.model = net.get()}, world);
  });
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const auto* from : {"run", "plain.safetensors"}) {
        SCOPED_TRACE(from);
        auto net = quantized_net(world, Start::Loaded);
        checkpoint::load_weights(net, folder / from);
        EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-5, 1e-6));
      }
      auto other = seeded();
      nn::quantize(other, {.quantization = Quantization::Int8});
      fully_shard(other, {.mesh = world});
      EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load_weights(other, folder / "run"); }), HasSubstr("int8"));
    });
  }
}

TEST(Quantize, LoadsStateDictsOfPlainWeights) {
  const auto dict = full_state_dict(seeded());
  auto expected = rounded(Quantization::Nf4);
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const bool broadcast : {false, true}) {
        SCOPED_TRACE(fmt::format("{} ranks, broadcast {}", world.size(), broadcast));
        auto net = deferred_init([] { return seeded(); });
        nn::quantize(net);
        fully_shard(net, {.mesh = world, .start = Start::Loaded}, wrap_classes({"Block"}));
        const bool has_dict = !broadcast || world.is_first();
        load_full_state_dict(net, has_dict ? dict : StateDict(), {.broadcast_from_rank0 = broadcast});
        EXPECT_EQ(net->named_parameters()["first.up.weight"].scalar_type(), at::kByte);
        EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-5, 1e-6));
        if (world.size() == 1) continue;
        auto plain = seeded();  // a rank needs the whole weight to encode its part
        fully_shard(plain, {.mesh = world}, wrap_classes({"Block"}));
        const auto load_parts = [&] { load_sharded_state_dict(net, sharded_state_dict(plain)); };
        EXPECT_THAT(message_of<UsageError>(load_parts), HasSubstr("the sharded state dict lacks the values"));
        EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-5, 1e-6));
      }
    });
  }
}

TEST(Quantize, HasTheValuesOfOneLayerAtATime) {
  static constexpr int64_t kWidth = 256, kLayers = 6, kBytes = kWidth * kWidth * sizeof(float);
  for (const int ranks : {1, 2}) {
    with_ranks(ranks, [&](const Communicator& world) {
      auto net = drawn(3, [] {
        torch::nn::Sequential layers;
        for (int64_t i = 0; i < kLayers; i++) layers->push_back(torch::nn::Linear(kWidth, kWidth));
        return layers;
      });
      nn::quantize(net);
      drawn(5, [&] { lora::apply(net, {.r = 2}); });
      fully_shard(net, {.mesh = world}, wrap_classes({"Linear"}));
      const auto x = at::ones({1, kWidth});
      const Allocations allocated;
      for (int step = 0; step < 2; step++) net->forward(x).sum().backward();
      EXPECT_GT(allocated.bytes(), 3 * kLayers * kBytes);  // computed in forward and in backward
      EXPECT_LT(allocated.peak(), 2 * kBytes);
    });
  }
}

/// A user-defined form: the upper halves of floats.
HeldForm upper_halves(const at::Tensor& weight) {
  return {.name = "upper halves",
          .sizes = weight.sizes().vec(),
          .dtype = weight.scalar_type(),
          .encode = [](const at::Tensor& values) { return values.to(at::kBFloat16).view({-1}); },
          .decode = [sizes = weight.sizes().vec()](const at::Tensor& held, at::ScalarType dtype) { return held.to(dtype).view(sizes); },
          .instead = {}};
}

TEST(HeldForm, MayBeOfAUser) {
  const Folder folder;
  auto expected = seeded();
  {
    const torch::NoGradGuard no_grad;
    for (auto* const block : {expected->first.get(), expected->second.get()}) block->up->weight.copy_(block->up->weight.to(at::kBFloat16));
  }
  const auto held_net = [&](const Communicator& world) {
    auto net = seeded();
    for (auto* const block : {net->first.get(), net->second.get()}) hold_in_form(*net, block->up->weight, upper_halves(block->up->weight));
    fully_shard(net, {.mesh = world}, wrap_classes({"Block"}));
    return net;
  };
  with_ranks(2, [&](const Communicator& world) {
    auto net = held_net(world);
    EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-6, 1e-6));
    EXPECT_EQ(net->named_parameters()["first.up.weight"].scalar_type(), at::kBFloat16);
    checkpoint::save(folder / "run", {.model = net.get()}, world);
  });
  with_ranks(3, [&](const Communicator& world) {
    auto net = held_net(world);
    checkpoint::load_weights(net, folder / "run");
    EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-6, 1e-6));
    auto other = seeded();
    nn::quantize(other);
    fully_shard(other, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load_weights(other, folder / "run"); }), HasSubstr("BFloat16 of [960] there"));
  });
}

TEST(Quantize, IsComputedWhereAModelHasNoValuesYet) {
  auto expected = deferred_init([] { return Net(); }, {.seed = 3});
  materialize(expected);
  round_weights(expected, Quantization::Nf4);
  with_ranks(2, [&](const Communicator& world) {
    auto net = deferred_init([] { return Net(); }, {.seed = 3});
    nn::quantize(net);
    fully_shard(net, {.mesh = world});
    EXPECT_TRUE(at::allclose(net(some_input()), expected(some_input()), 1e-5, 1e-6));
  });
}

TEST(Quantize, RefusesWhatMakesNoSense) {
  auto net = seeded();
  EXPECT_THAT(message_of<UsageError>([&] { nn::quantize(net, {.layers = {.target_modules = {"q_proj"}}}); }), HasSubstr("up, down, head"));
  {
    const torch::NoGradGuard no_grad;
    net->first->up->weight[2][3] = NAN;
  }
  EXPECT_THAT(message_of<UsageError>([&] { nn::quantize(net); }), HasSubstr("first.up"));
  EXPECT_THAT(message_of<UsageError>([] { (void)nn::quantization_named("nf8"); }), HasSubstr("nf4_single"));
  auto adapted = seeded();
  nn::quantize(adapted);
  lora::apply(adapted, {.r = 2});
  EXPECT_THAT(message_of<UsageError>([&] { lora::merge(adapted); }), HasSubstr("nf4"));
  with_ranks(2, [](const Communicator& world) {
    auto here = seeded();
    nn::quantize(here, {.quantization = world.is_first() ? Quantization::Nf4 : Quantization::Int8});
    EXPECT_THAT(message_of<DisagreementError>([&] { fully_shard(here, {.mesh = world}); }), HasSubstr("up.weight"));
  });
}

}  // namespace
}  // namespace tessera::testing::quantize_test
