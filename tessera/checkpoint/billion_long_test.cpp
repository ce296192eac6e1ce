// Creates a transformer of a billion parameters on two ranks without memory, loads it and trains it in the memory that a formula predicts.
// The ranks are threads, so the kernel's numbers for the process are those of both ranks together.
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <torch/torch.h>

#include <fstream>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/models/gpt.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/checkpoint_modules.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/local.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/report.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::billion_long_test {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kLength = 128;
const models::GptOptions kOptions{.width = 2048, .layers = 20, .heads = 16, .longest = kLength};

/// Returns megabytes of this process as the kernel counts them: VmRSS are those in use now, VmHWM the most that were ever in use.
double kernel_megabytes(const std::string& key) {
  std::ifstream lines("/proc/self/status");
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with(key + ":")) return std::stod(line.substr(key.size() + 1)) * 1024 / 1e6;
  }
  return 0;
}

/// Resets VmHWM, which counts from the memory in use now.
void forget_most_memory() {
  ::malloc_trim(0);  // returns freed memory, which would count otherwise
  std::ofstream("/proc/self/clear_refs") << 5;
}

/// Memory by kind, in megabytes of all ranks together.
struct Memory {
  double shards = 0, gradients = 0, state = 0, unsharded = 0;
  double unreduced = 0, activations = 0;
  double sum() const { return shards + gradients + state + unsharded + unreduced + activations; }
};

std::ostream& operator<<(std::ostream& out, const Memory& memory) {
  return out << fmt::format(
             "shards {:.0f}, their gradients {:.0f} and momentum {:.0f}, unsharded {:.0f}, unreduced {:.0f}, activations {:.0f}: {:.0f} MB",
             memory.shards, memory.gradients, memory.state, memory.unsharded, memory.unreduced, memory.activations, memory.sum());
}

/// Returns the expected memory. On each rank, the root and two blocks are unsharded at a time, and as many have gradients that are not
/// reduced yet. A checkpointed block keeps its input; the block that is recomputed has 16 values of the model's width for each token, and
/// their gradients.
Memory formula() {
  const auto width = static_cast<double>(kOptions.width), layers = static_cast<double>(kOptions.layers);
  const auto block = 4 * (12 * width * width + 13 * width) / 1e6;
  const auto root = 4 * width * static_cast<double>(2 * kOptions.vocabulary + kOptions.longest + 2) / 1e6;
  const auto all = layers * block + root;
  return {.shards = all,
          .gradients = all,
          .state = all,
          .unsharded = kRanks * (root + 2 * block),
          .unreduced = kRanks * (root + 2 * block),
          .activations = kRanks * (layers + 32) * 4 * width * kLength / 1e6};
}

at::Tensor loss_of(models::Gpt& model, const at::Tensor& ids) {
  auto x = model->tokens(ids.slice(1, 0, -1)) + model->positions(torch::arange(kLength));
  for (const auto& each : *model->blocks) x = activation::checkpoint(std::static_pointer_cast<models::GptBlockImpl>(each), x);
  return at::cross_entropy_loss(model->head(model->norm(x)).flatten(0, 1), ids.slice(1, 1).flatten());
}

models::Gpt sharded(const Communicator& world, Start start, const models::GptOptions& model_options = kOptions) {
  auto model = deferred_init([&] { return models::Gpt(model_options); }, {.seed = 7});
  const ShardOptions options{.mesh = world, .start = start, .residence = Residence::Gathered};
  for (const auto& block : *model->blocks) fully_shard(block, options);
  fully_shard(model, options);
  return model;
}

std::vector<double> sums_of(const models::Gpt& model) {
  std::vector<double> sums;
  for (const auto& shard : parameters(*model)) sums.push_back(to_local(shard.detach()).sum(at::kDouble).item<double>());
  return sums;
}

double over_ranks(const Communicator& world, double value) {
  const auto all = at::full({1}, value, at::kDouble);
  world.all_reduce(all, {.op = Reduce::Sum}).wait();
  return all.item<double>();
}

TEST(ABillionParameters, AreMadeLoadedAndTrainedWithTheMemoryOfTheFormula) {
  const auto expected = formula();
  const Folder folder(folder_on_disk());
  run_world(
      {.transport = "threads", .ranks = kRanks},
      [&](const Communicator& world) {
        {
          auto small = sharded(world, Start::Equal, {.width = 256, .layers = 1, .longest = kLength});
          loss_of(small, at::zeros({1, kLength + 1}, at::kLong)).backward();
        }
        world.barrier();
        const auto without = kernel_megabytes("VmRSS");  // memory that libraries keep after their first use
        world.barrier();
        std::vector<double> sums;
        {
          auto model = sharded(world, Start::Equal);
          sums = sums_of(model);
          checkpoint::save(folder / "start", {.model = model.get()}, world);
        }
        world.barrier();
        if (world.is_first()) forget_most_memory();
        world.barrier();
        auto model = sharded(world, Start::Loaded);
        checkpoint::load_weights(*model, folder / "start");
        world.barrier();
        const auto to_load = kernel_megabytes("VmHWM") - without;
        world.barrier();
        EXPECT_EQ(sums_of(model), sums);
        if (world.is_first())
          std::cout << fmt::format("made and loaded with at most {:.0f} MB, shards are {:.0f}\n", to_load, expected.shards);
        EXPECT_LT(to_load, 1.05 * expected.shards);

        optim::SGD optimizer(parameters(*model), {.lr = 1e-3, .momentum = 0.9});
        const auto ids = (at::arange(kLength + 1) * (31 + world.rank())).remainder(kOptions.vocabulary).view({1, -1});
        std::vector<double> losses;
        for (int step = 0; step < 3; step++) {
          if (step == 2) {
            world.barrier();
            if (world.is_first()) forget_most_memory();
            reset_counters(*model);
            world.barrier();
          }
          const auto loss = loss_of(model, ids);
          loss.backward();
          optimizer.step();
          losses.push_back(loss.item<double>());
          if (step < 2) optimizer.zero_grad();
        }
        EXPECT_LT(losses.back(), losses.front());
        world.barrier();
        const auto measured = kernel_megabytes("VmHWM") - without;
        Memory tracked;
        for (const auto& shard : parameters(*model)) {
          tracked.shards += static_cast<double>(shard.nbytes()) / 1e6;
          tracked.gradients += static_cast<double>(shard.grad().nbytes()) / 1e6;
        }
        for (const auto& [name, state] : optimizer.state(*model)) {
          for (const auto& [key, tensor] : state) tracked.state += static_cast<double>(tensor.nbytes()) / 1e6;
        }
        tracked.unsharded = static_cast<double>(counters(*model).peak_unsharded_bytes) / 1e6;
        for (auto* kind : {&tracked.shards, &tracked.gradients, &tracked.state, &tracked.unsharded}) *kind = over_ranks(world, *kind);
        if (!world.is_first()) return;
        std::cout << "formula: " << expected << "\ntracked: " << tracked << fmt::format("\nmeasured: {:.0f} MB\n", measured);
        EXPECT_NEAR(tracked.shards / expected.shards, 1, 0.01);
        EXPECT_NEAR(tracked.gradients / expected.gradients, 1, 0.01);
        EXPECT_NEAR(tracked.state / expected.state, 1, 0.01);
        EXPECT_NEAR(tracked.unsharded / expected.unsharded, 1, 0.05);
        EXPECT_NEAR(measured / expected.sum(), 1, 0.05);
      },
      std::chrono::minutes(20));
}

}  // namespace
}  // namespace tessera::testing::billion_long_test
