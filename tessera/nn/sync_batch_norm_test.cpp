#include "tessera/nn/sync_batch_norm.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/nn/collectives.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/net.h"
#include "tests/testing/numbers.h"

namespace tessera::testing::sync_batch_norm_test {
namespace {

namespace tnn = torch::nn;
using ::testing::HasSubstr;

/// One case: what the ranks have in their batches.
struct Case {
  std::vector<int64_t> rows;          // of each rank
  std::vector<int64_t> rest = {5};    // the sizes of the dimensions after the first
  tnn::BatchNormOptions options = 5;  // the number of channels is rest[0]
  at::ScalarType dtype = at::kFloat;
  at::MemoryFormat format = at::MemoryFormat::Contiguous;
};

at::Tensor batch(const Case& test, size_t rank, int step) {
  auto sizes = test.rest;
  sizes.insert(sizes.begin(), test.rows[rank]);
  auto x = (at::arange(c10::multiply_integers(sizes), at::kDouble).view(sizes) * 1.3 + static_cast<double>(rank) + 0.7 * step).sin() * 2 + 3;
  return x.to(test.dtype, false, false, test.format).detach();
}

at::Tensor loss_of(const at::Tensor& y) {
  return (y.to(at::kDouble) - 0.2).pow(3).sum();
}

/// torch's module over the batches of all ranks in one process.
at::Tensor batch_norm(tnn::BatchNorm1d& norm, const at::Tensor& x) {
  return x.dim() > 2 ? norm(x.flatten(2)).view(x.sizes()) : norm(x);
}

void expect_as_one_process(const Case& test) {
  with_ranks(static_cast<int>(test.rows.size()), [&](const Communicator& world) {
    const auto own = static_cast<size_t>(world.rank());
    nn::SyncBatchNorm sync(test.options, world);
    tnn::BatchNorm1d whole(test.options);
    if (test.options.affine()) {
      for (auto& parameters : {sync->parameters(), whole->parameters()}) {
        const torch::NoGradGuard no_grad;
        parameters[0].copy_(at::arange(1, 6) * 0.3);
        parameters[1].copy_(at::arange(5) * 0.2);
      }
    }
    const double tolerance = test.dtype == at::kBFloat16 ? 1e-1 : 2e-4;
    const auto expect_close = [&](const at::Tensor& one, const at::Tensor& other, const char* what) {
      EXPECT_TRUE(at::allclose(one.to(at::kDouble), other.to(at::kDouble), tolerance, tolerance)) << what << one << other;
    };
    for (int step = 0; step < 3; step++) {
      const auto x = batch(test, own, step).requires_grad_();
      const auto y = sync(x);
      EXPECT_EQ(y.scalar_type(), test.dtype);
      loss_of(y).backward();
      std::vector<at::Tensor> all;
      for (size_t rank = 0; rank < test.rows.size(); rank++) all.push_back(batch(test, rank, step).to(at::kFloat).requires_grad_());
      const auto expected = batch_norm(whole, at::cat(all));
      loss_of(expected).backward();
      int64_t begin = 0;
      for (size_t rank = 0; rank < own; rank++) begin += test.rows[rank];
      expect_close(y, expected.narrow(0, begin, test.rows[own]), "output");
      expect_close(x.grad(), all[own].grad(), "gradient of the input");
      for (size_t i = 0; i < whole->parameters().size(); i++) {
        expect_close(nn::all_reduce(sync->parameters()[i].grad(), world), whole->parameters()[i].grad(), "gradient of a parameter");
      }
      for (size_t i = 0; i < whole->buffers().size(); i++) {
        if (whole->buffers()[i].defined()) expect_close(sync->buffers()[i], whole->buffers()[i], "buffer");
      }
    }
    sync->eval();
    whole->eval();
    const auto x = batch(test, 0, 7);
    // libtorch's own batch norm takes no float64 with float32 parameters.
    if (test.options.track_running_stats() && test.dtype != at::kDouble)
      expect_close(sync(x), batch_norm(whole, x.to(at::kFloat)), "evaluation");
  });
}

TEST(SyncBatchNorm, IsBatchNormOverTheBatchesOfAllRanks) {
  expect_as_one_process({.rows = {3, 3}});
  expect_as_one_process({.rows = {1, 4, 2}});
  expect_as_one_process({.rows = {1, 1}});
  expect_as_one_process({.rows = {4}});
  expect_as_one_process({.rows = {3, 0}});
  expect_as_one_process({.rows = {2, 3}, .rest = {5, 2, 3}});
  expect_as_one_process({.rows = {2, 3}, .rest = {5, 2, 3}, .format = at::MemoryFormat::ChannelsLast});
  expect_as_one_process({.rows = {2, 1}, .dtype = at::kDouble});
  expect_as_one_process({.rows = {8, 5}, .dtype = at::kBFloat16});
}

TEST(SyncBatchNorm, HasTheOptionsOfBatchNorm) {
  expect_as_one_process({.rows = {2, 3}, .options = tnn::BatchNormOptions(5).momentum(std::nullopt)});
  expect_as_one_process({.rows = {2, 3}, .options = tnn::BatchNormOptions(5).momentum(0.3).eps(0.1)});
  expect_as_one_process({.rows = {2, 3}, .options = tnn::BatchNormOptions(5).affine(false)});
  expect_as_one_process({.rows = {2, 3}, .options = tnn::BatchNormOptions(5).track_running_stats(false)});
}

/// libtorch's kernel is wrong for one image whose gradient has another memory format than its values.
TEST(SyncBatchNorm, TakesGradientsInAnyLayout) {
  using at::MemoryFormat;
  for (const auto of_x : {MemoryFormat::Contiguous, MemoryFormat::ChannelsLast}) {
    for (const auto of_gradient : {MemoryFormat::Contiguous, MemoryFormat::ChannelsLast}) {
      for (const int64_t images : {1, 2}) {
        with_ranks(2, [&](const Communicator& world) {
          const Case test{.rows = {images, 3}, .rest = {5, 3, 4}};
          const auto own = static_cast<size_t>(world.rank());
          nn::SyncBatchNorm sync(test.options, world);
          const auto x = batch(test, own, 0).contiguous(of_x).requires_grad_();
          const auto weights_of = [&](size_t rank) { return batch(test, rank, 1).cos(); };
          sync(x).backward(weights_of(own).contiguous(of_gradient));
          tnn::BatchNorm1d whole(test.options);
          const auto all = at::cat({batch(test, 0, 0), batch(test, 1, 0)}).to(at::kDouble).requires_grad_();
          whole->to(at::kDouble);
          batch_norm(whole, all).backward(at::cat({weights_of(0), weights_of(1)}).to(at::kDouble));
          const auto expected = all.grad().narrow(0, own == 0 ? 0 : images, test.rows[own]);
          EXPECT_LT((x.grad().to(at::kDouble) - expected).abs().max().item<double>(), 1e-4) << of_x << of_gradient << images;
          for (size_t i = 0; i < 2; i++) {
            const auto sum = nn::all_reduce(sync->parameters()[i].grad(), world).to(at::kDouble);
            EXPECT_LT((sum - whole->parameters()[i].grad()).abs().max().item<double>(), 1e-4) << of_x << of_gradient << images;
          }
        });
      }
    }
  }
}

TEST(SyncBatchNorm, RefusesWhatHasNoStatistics) {
  with_ranks(2, [](const Communicator& world) {
    nn::SyncBatchNorm norm(tnn::BatchNormOptions(5), world);
    EXPECT_THAT(message_of<UsageError>([&] { norm(at::ones({world.rank(), 5})); }), HasSubstr("needs more than one value per channel"));
    EXPECT_THAT(message_of<UsageError>([&] { norm(at::ones({2, 4})); }), HasSubstr("5 channels"));
    const auto x = at::ones({2, 5}).requires_grad_();
    const auto y = norm(x * 1).pow(2).sum();
    EXPECT_THAT(message_of<UsageError>([&] { torch::autograd::grad({y}, {x}, {}, true, /*create_graph=*/true); }),
                HasSubstr("second derivatives"));
  });
}

struct Plain : tnn::Module {
  tnn::Linear first = register_module("first", tnn::Linear(6, 5));
  tnn::BatchNorm1d norm = register_module("norm", tnn::BatchNorm1d(5));
  tnn::Linear second = register_module("second", tnn::Linear(5, 3));
  Plain() { fill_with_numbers(*this); }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};

struct Synced : tnn::Module {
  tnn::Linear first = register_module("first", tnn::Linear(6, 5));
  nn::SyncBatchNorm norm;
  tnn::Linear second = register_module("second", tnn::Linear(5, 3));
  explicit Synced(const Communicator& world) : norm(register_module("norm", nn::SyncBatchNorm(tnn::BatchNormOptions(5), world))) {
    fill_with_numbers(*this);
  }
  at::Tensor forward(const at::Tensor& x) { return second(torch::tanh(norm(first(x)))); }
};

at::Tensor rows_of(int rank) {
  return (at::arange(6 * (2 + rank), at::kFloat).view({2 + rank, 6}) * 0.7 + rank).sin();
}

/// The second rank has no rows.
at::Tensor rows_of_some(int rank) {
  return rank == 1 ? at::empty({0, 6}) : rows_of(rank);
}

/// Trains a sharded model and compares it with one process that has the batches of all ranks.
template <class Model>
void expect_trained_as_one_process(const std::shared_ptr<Model>& model, const Communicator& world,
                                   const std::function<at::Tensor(int rank)>& rows = rows_of) {
  const auto whole = std::make_shared<Plain>();
  for (int pass = 0; pass < 2; pass++) {
    call(model, rows(world.rank())).pow(2).sum().backward();
    auto sum = at::zeros({});
    std::vector<at::Tensor> all;
    for (int rank = 0; rank < world.size(); rank++) all.push_back(rows(rank));
    (whole->forward(at::cat(all)).pow(2).sum() / world.size()).backward();
  }
  const auto members =
      std::vector{std::pair(model->first->weight, whole->first->weight), std::pair(model->norm->weight, whole->norm->weight),
                  std::pair(model->norm->bias, whole->norm->bias), std::pair(model->second->weight, whole->second->weight)};
  for (const auto& [sharded, expected] : members) {
    EXPECT_TRUE(at::allclose(full_grad(sharded), expected.grad(), 1e-4, 1e-5)) << expected.grad();
  }
  for (const auto& item : whole->named_buffers())
    EXPECT_TRUE(at::allclose(model->named_buffers()[item.key()], item.value(), 1e-5, 1e-6)) << item.key();
}

TEST(SyncBatchNorm, TrainsInUnitsAndSegments) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      for (const bool segments : {false, true}) {
        const auto model = std::make_shared<Synced>(world);
        fully_shard(model->norm, {.mesh = world, .residence = residence});
        fully_shard(model, {.mesh = world, .residence = residence});
        if (segments) activation::checkpoint_module(model);
        expect_trained_as_one_process(model, world);
      }
    }
  });
}

TEST(SyncBatchNorm, TakesThePlaceOfBatchNormInASharedModel) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      for (const bool segments : {false, true}) {
        const auto model = std::make_shared<Plain>();
        fully_shard(model->norm, {.mesh = world, .residence = residence});
        fully_shard(model, {.mesh = world, .residence = residence});
        nn::convert_sync_batchnorm(*model, world);
        if (segments) activation::checkpoint_module(model);
        expect_trained_as_one_process(model, world);
        model->eval();
        EXPECT_EQ(call(model, rows_of(world.rank())).size(0), 2 + world.rank());
      }
    }
  });
}

/// If the norm is a unit of its own, the other ranks would wait for a rank that does not use it.
TEST(SyncBatchNorm, TakesAnEmptyBatchInAUnitOfItsOwn) {
  with_ranks(3, [](const Communicator& world) {
    for (const auto residence : {Residence::NodeShared, Residence::Gathered}) {
      const auto shard = [&](const auto& model) {
        for (const auto& child : model->children()) fully_shard(child, {.mesh = world, .residence = residence});
        fully_shard(model, {.mesh = world, .residence = residence});
      };
      const auto synced = std::make_shared<Synced>(world);
      shard(synced);
      expect_trained_as_one_process(synced, world, rows_of_some);
      const auto plain = std::make_shared<Plain>();
      shard(plain);
      nn::convert_sync_batchnorm(*plain, world);
      expect_trained_as_one_process(plain, world, rows_of_some);
    }
  });
}

TEST(SyncBatchNorm, NamesWhatItCanNotTakeThePlaceOf) {
  with_ranks(2, [](const Communicator& world) {
    const auto model = std::make_shared<Plain>();
    model->register_module("other", tnn::BatchNorm2d(tnn::BatchNorm2dOptions(4).affine(false)));
    EXPECT_THAT(message_of<UsageError>([&] { nn::convert_sync_batchnorm(*model, world); }),
                AllOf(HasSubstr("'norm', 'other'"), HasSubstr("call it after fully_shard")));
    fully_shard(model, {.mesh = world});
    EXPECT_THAT(message_of<UsageError>([&] { nn::convert_sync_batchnorm(*model, world); }),
                AllOf(HasSubstr("'other'"), Not(HasSubstr("'norm'"))));
  });
}

}  // namespace
}  // namespace tessera::testing::sync_batch_norm_test
