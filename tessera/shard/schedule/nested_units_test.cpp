// Units inside of units: at any depth, and made from lists of modules.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>

#include "tessera/shard/full_params.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tessera/shard/unit/units.h"
#include "tests/testing/net.h"

namespace tessera::testing::nested_units_test {
namespace {

TEST(NestedUnits, GoToAnyDepthAndMayBeLists) {
  with_ranks(2, [](const Communicator& world) {
    struct Inner : torch::nn::Module {
      torch::nn::Linear first{nullptr}, second{nullptr};
      Inner() {
        first = register_module("first", torch::nn::Linear(6, 6));
        second = register_module("second", torch::nn::Linear(6, 6));
      }
      at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(first(x))); }
    };
    struct Outer : torch::nn::Module {
      std::shared_ptr<Inner> inner;
      torch::nn::Linear head{nullptr}, tail{nullptr};
      at::Tensor scale;
      Outer() {
        inner = register_module("inner", std::make_shared<Inner>());
        head = register_module("head", torch::nn::Linear(6, 6));
        tail = register_module("tail", torch::nn::Linear(6, 6));
        scale = register_parameter("scale", torch::ones({6}));
      }
      at::Tensor forward(const at::Tensor& x) { return tail(head(inner->forward(x))) * scale; }
    };
    const auto make = [] {
      static std::mutex generator;
      std::lock_guard lock(generator);
      torch::manual_seed(3);
      return std::make_shared<Outer>();
    };
    auto unsharded = make(), sharded = make();
    const std::vector<std::shared_ptr<torch::nn::Module>> ends = {sharded->head.ptr(), sharded->tail.ptr()};
    fully_shard(sharded->inner->first, {.mesh = world});  // depth 3
    fully_shard(sharded->inner, {.mesh = world});         // depth 2: takes `second`
    fully_shard(ends, {.mesh = world});                   // a list is one unit
    fully_shard(sharded, {.mesh = world});                // depth 1: takes `scale`
    ASSERT_EQ(units(*sharded).size(), 4);
    for (int step = 0; step < 3; step++) {
      unsharded->zero_grad();
      sharded->zero_grad();
      unsharded->forward(input()).pow(2).sum().backward();
      sharded->forward(input()).pow(2).sum().backward();
      const auto shards = sharded->named_parameters();
      for (const auto& item : unsharded->named_parameters()) {
        EXPECT_TRUE(at::allclose(full_grad(shards[item.key()]), item.value().grad(), 1e-5, 1e-6)) << item.key();
      }
    }
    EXPECT_EQ(shard_info(sharded->inner->named_parameters()["first.weight"])->unit, "inner.first");
    const auto text = describe(*sharded);
    const auto line = [&](const std::string& start) { return text.find("\n" + start + " "); };
    EXPECT_LT(line("Outer"), line("  inner")) << text;
    EXPECT_LT(line("  inner"), line("    inner.first")) << text;
    EXPECT_LT(line("    inner.first"), line("  head+tail")) << text;
    EXPECT_NE(line("  head+tail"), std::string::npos) << text;
  });
}

}  // namespace
}  // namespace tessera::testing::nested_units_test
