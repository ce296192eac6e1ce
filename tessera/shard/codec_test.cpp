// Codecs other than casts, such as one that sends eight bits for each value, with a scale for each chunk.
#include "tessera/shard/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"
#include "tessera/shard/unsharding.h"
#include "tests/testing/default_device.h"
#include "tests/testing/net.h"
#include "tests/testing/residences.h"

namespace tessera::testing::codec_test {
namespace {

using ::testing::HasSubstr;

/// Sends each value as a multiple of 1/127 of the chunk's largest value, and after them that largest value.
struct EightBits final : Codec {
  at::ScalarType computed(at::ScalarType stored) const override { return stored; }
  Form sent(at::ScalarType /*stored*/, int64_t numel) const override { return {.dtype = at::kChar, .numel = numel + 4}; }
  bool encodes(at::ScalarType /*stored*/) const override { return true; }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override {
    const auto most = stored.numel() > 0 ? stored.abs().max() : at::zeros({});
    const auto numel = stored.numel();
    sent.narrow(0, 0, numel).copy_((stored / most.clamp_min(1e-30) * 127).round());
    sent.narrow(0, numel, 4).copy_(most.reshape({1}).view(at::kChar));
  }
  bool decodes(at::ScalarType /*stored*/) const override { return true; }
  void decode(const at::Tensor& sent, const at::Tensor& computed) const override {
    const auto most = sent.narrow(0, computed.numel(), 4).clone().view(at::kFloat);
    computed.copy_(sent.narrow(0, 0, computed.numel()).to(at::kFloat) * (most / 127));
  }
};

/// Eight bits for floating-point values alone, as in a unit whose other values are integers already.
struct EightBitsOfFloats final : Codec {
  EightBits bits;
  at::ScalarType computed(at::ScalarType stored) const override { return stored; }
  Form sent(at::ScalarType stored, int64_t numel) const override {
    return at::isFloatingType(stored) ? bits.sent(stored, numel) : Form{.dtype = stored, .numel = numel};
  }
  bool encodes(at::ScalarType stored) const override { return at::isFloatingType(stored); }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override { bits.encode(stored, sent); }
  bool decodes(at::ScalarType stored) const override { return at::isFloatingType(stored); }
  void decode(const at::Tensor& sent, const at::Tensor& computed) const override { bits.decode(sent, computed); }
};

/// Half of each value: the stored dtype, and yet another form.
struct Halves final : Codec {
  at::ScalarType computed(at::ScalarType stored) const override { return stored; }
  Form sent(at::ScalarType stored, int64_t numel) const override { return {.dtype = stored, .numel = numel}; }
  bool encodes(at::ScalarType /*stored*/) const override { return true; }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override {
    at::mul_out(const_cast<at::Tensor&>(sent), stored, at::scalar_tensor(0.5F));
  }
};

TEST(Codec, OfCastsIsTheDefault) {
  const auto values = at::arange(5, at::kFloat).div(3);
  EXPECT_TRUE(encoded(*cast_codec({}), values).is_same(values));
  EXPECT_TRUE(at::equal(encoded(*cast_codec(at::kBFloat16), values), values.to(at::kBFloat16)));
  EXPECT_FALSE(cast_codec(at::kBFloat16)->encodes(at::kLong));
}

TEST(Codec, SendsItsOwnFormAndComputesWithWhatArrives) {
  with_ranks(3, [](const Communicator& world) {
    auto net = seeded_net(), plain = seeded_net();
    fully_shard(net, {.mesh = world, .codec = std::make_shared<EightBits>()});
    EXPECT_EQ(units(*net).front()->memory().residence, "gathered");
    const auto close = [&] { return at::allclose(net(input()), plain(input()), 0.05, 0.05); };
    EXPECT_TRUE(close());
    EXPECT_FALSE(at::equal(net(input()), plain(input())));
    // Each gather receives one byte for each value, and four bytes for each chunk, from each of the two other ranks.
    const auto cost = counters(*net);
    int64_t chunk = 0;
    for (const auto& shard : parameters(*net)) chunk = std::max(chunk, shard.storage_offset() + shard.numel());
    EXPECT_LT(cost.gathered_bytes, cost.gathers * 2 * static_cast<uint64_t>(chunk) * 2);

    optim::SGD sharded(parameters(*net), {.lr = 0.05});
    torch::optim::SGD replicated(plain->parameters(), 0.05);
    for (int step = 0; step < 5; step++) {
      net(input()).pow(2).mean().backward();
      plain(input()).pow(2).mean().backward();
      sharded.step();
      replicated.step();
      sharded.zero_grad();
      replicated.zero_grad();
    }
    EXPECT_TRUE(close());
    // The stored values are not rounded.
    const auto shards = parameters(*net);
    EXPECT_TRUE(at::allclose(full_parameter(shards[0]), plain->a->weight, 1e-2, 1e-2));
  });
}

TEST(Codec, DecidesForEachDtypeOfAUnit) {
  struct Mixed : torch::nn::Module {
    at::Tensor scale = register_parameter("scale", at::linspace(-1, 1, 9));
    at::Tensor codes = register_parameter("codes", at::arange(-5, 4, at::kChar), /*requires_grad=*/false);
  };
  const auto refuses = [](const Communicator& world, Mixed& mixed, CodecPtr codec) {
    return message_of<ConfigError>(
        [&] { fully_shard(mixed, {.mesh = world, .residence = Residence::NodeShared, .codec = std::move(codec)}); });
  };
  with_ranks(2, [&](const Communicator& world) {
    Mixed mixed, refused;
    EXPECT_THAT(refuses(world, refused, std::make_shared<EightBitsOfFloats>()),
                HasSubstr(on_cpu() ? "codec decodes" : "not in host memory"));
    fully_shard(mixed, {.mesh = world, .codec = std::make_shared<EightBitsOfFloats>()});
    // Both are sent as eight bits, one after the other, and only one of them has to be decoded.
    EXPECT_TRUE(at::allclose(mixed.scale + 0, at::linspace(-1, 1, 9), 0, 0.01));
    EXPECT_TRUE(at::equal(mixed.codes + 0, at::arange(-5, 4, at::kChar)));
  });
}

/// Computes in bfloat16, like a param_dtype.
struct InBfloat16 final : Codec {
  bool says_so = true;
  at::ScalarType computed(at::ScalarType stored) const override { return stored == at::kFloat ? at::kBFloat16 : stored; }
  Form sent(at::ScalarType stored, int64_t numel) const override { return {.dtype = computed(stored), .numel = numel}; }
  bool encodes(at::ScalarType stored) const override { return says_so && stored == at::kFloat; }
  void encode(const at::Tensor& stored, const at::Tensor& sent) const override { sent.copy_(stored); }
};

TEST(Codec, CastsOperandsToTheDtypeInWhichItComputes) {
  with_ranks(2, [](const Communicator& world) {
    auto by_codec = seeded_net(), by_dtype = seeded_net();
    fully_shard(by_codec, {.mesh = world, .codec = std::make_shared<InBfloat16>()});
    fully_shard(by_dtype, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    EXPECT_EQ(by_codec(input()).scalar_type(), at::kBFloat16);
    EXPECT_TRUE(at::equal(by_codec(input()), by_dtype(input())));
  });
}

TEST(Codec, IsRefusedIfItContradictsItself) {
  with_ranks(1, [](const Communicator& world) {
    struct Forgetful final : Codec {
      EightBits bits;
      at::ScalarType computed(at::ScalarType stored) const override { return stored; }
      Form sent(at::ScalarType stored, int64_t numel) const override { return bits.sent(stored, numel); }
      bool encodes(at::ScalarType /*stored*/) const override { return true; }
      void encode(const at::Tensor& stored, const at::Tensor& sent) const override { bits.encode(stored, sent); }
    };
    const auto refusal = [&](CodecPtr codec) {
      torch::nn::Linear layer(5, 7);
      return message_of<UsageError>([&] { fully_shard(layer, {.mesh = world, .codec = std::move(codec)}); });
    };
    EXPECT_THAT(refusal(std::make_shared<Forgetful>()), HasSubstr("does not decode"));
    const auto silent = std::make_shared<InBfloat16>();
    silent->says_so = false;
    EXPECT_THAT(refusal(silent), HasSubstr("does not encode"));
  });
}

TEST(Codec, LosesNothingThatFullParamsLeavesAlone) {
  with_ranks(2, [](const Communicator& world) {
    auto net = seeded_net();
    const auto before = seeded_net()->b->weight;
    fully_shard(net, {.mesh = world, .codec = std::make_shared<EightBits>()});
    {
      const auto guard = full_params(*net, Access::Write);
      const torch::NoGradGuard no_grad;
      net->a->bias.fill_(0.25);
    }
    const auto shards = parameters(*net);
    EXPECT_TRUE(at::equal(full_parameter(shards[2]), before)) << "to the bit";
    EXPECT_TRUE(at::allclose(full_parameter(shards[1]), at::full({10}, 0.25)));
  });
}

TEST(Codec, LetsAModelDieWhileItIsUnsharded) {
  with_ranks(2, [](const Communicator& world) {
    std::weak_ptr<Unit> unit;
    {
      auto net = seeded_net();
      fully_shard(net, {.mesh = world, .codec = std::make_shared<EightBits>()});
      unit = units(*net).front();
      (void)unshard(*net);
    }
    EXPECT_TRUE(unit.expired());
  });
}

TEST(Codec, ThatDoesNotDecodeServesSharedMemoryToo) {
  for (const auto residence : residences()) {
    with_ranks(2, [&](const Communicator& world) {
      auto net = seeded_net(), plain = seeded_net();
      fully_shard(net, {.mesh = world, .residence = residence, .codec = std::make_shared<Halves>()});
      for (int step = 0; step < 2; step++) {
        const torch::NoGradGuard no_grad;
        auto halved = seeded_net();
        for (size_t i = 0; i < halved->parameters().size(); i++) halved->parameters()[i].copy_(plain->parameters()[i] * 0.5);
        EXPECT_TRUE(at::equal(net(input()), halved(input()))) << "step " << step;
        for (auto& shard : parameters(*net)) shard.mul_(1.5);
        for (auto& parameter : plain->parameters()) parameter.mul_(1.5);
      }
    });
  }
}

TEST(Codec, IsRefusedWhereItCanNotBe) {
  with_ranks(1, [](const Communicator& world) {
    torch::nn::Linear layer(5, 7);
    const auto codec = std::make_shared<EightBits>();
    const auto refusal = [&]<class Error>(const ShardOptions& options) { return message_of<Error>([&] { fully_shard(layer, options); }); };
    EXPECT_THAT(refusal.operator()<UsageError>({.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}, .codec = codec}),
                HasSubstr("give one of them"));
    if (on_cpu()) {
      EXPECT_THAT(refusal.operator()<ConfigError>({.mesh = world, .residence = Residence::NodeShared, .codec = codec}),
                  HasSubstr("codec decodes"));
    }
  });
}

}  // namespace
}  // namespace tessera::testing::codec_test
