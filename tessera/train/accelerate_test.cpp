// The Trainer's functions return the same on each rank as Accelerate's functions of the same names.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <mutex>
#include <sstream>

#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/trained.h"

namespace tessera::testing::trainer_accelerate_test {
namespace {

class Lines {
 public:
  void add(const std::string& name, const at::Tensor& tensor) {
    text_ << name << ':';
    const auto flat = tensor.to(at::kLong).flatten();
    for (int64_t i = 0; i < flat.numel(); i++) text_ << ' ' << flat[i].item<int64_t>();
    text_ << '\n';
  }
  std::string text() const { return text_.str(); }

 private:
  std::ostringstream text_;
};

const std::vector<std::pair<int, int>> kSizes = {{9, 5}, {8, 2}, {7, 2}, {3, 4}, {1, 1}, {10, 3}, {5, 1}};

data::StreamOptions numbers_up_to(int64_t size) {
  return {.open = [size](int64_t /*epoch*/) {
    return [size, next = int64_t{0}]() mutable -> std::optional<data::Samples> {
      if (next == size) return std::nullopt;
      return data::Samples{.inputs = at::scalar_tensor(next++, at::kLong).view({1}), .targets = {}};
    };
  }};
}

void add_streams(const Trainer& trainer, Lines& lines) {
  const auto numbered = [](const char* what, int size, int batch, int64_t number) {
    return std::string(what) + ' ' + std::to_string(size) + ' ' + std::to_string(batch) + ' ' + std::to_string(number);
  };
  for (const auto& [size, batch] : kSizes) {
    for (const auto tail : {data::Tail::Fill, data::Tail::Drop}) {
      auto options = numbers_up_to(size);
      options.global_batch = batch * trainer.num_processes();
      options.tail = tail;
      std::vector<at::Tensor> own = {at::empty({0}, at::kLong)};
      if (tail == data::Tail::Fill || size >= options.global_batch) {  // Accelerate has an empty epoch where Tessera refuses
        data::Loader loader(trainer.make_stream(options));
        for (const auto& rows : loader) own.push_back(rows.inputs);
      }
      lines.add(numbered("stream", size, batch, tail == data::Tail::Drop ? 1 : 0), at::cat(own));
    }
  }
  for (const auto& [size, batch] : kSizes) {
    auto options = numbers_up_to(size);
    options.global_batch = batch * trainer.num_processes();
    options.tail = data::Tail::Keep;
    data::Loader loader(trainer.make_stream(options), {.dispatch = trainer.world()});
    int64_t number = 0;
    for (const auto& rows : loader)
      lines.add(numbered("dispatched", size, batch, number++), rows.inputs.narrow(0, 0, rows.size() - rows.repeats));
  }
}

/// Rank 1 has three batches, rank 0 has one.
at::Tensor trained_on_streams_of_different_lengths(const Communicator& world) {
  Trainer trainer({.world = world});
  torch::nn::Linear model(torch::nn::LinearOptions(2, 1).bias(false));
  model->to(at::kDouble);
  model->weight.detach().copy_(at::tensor({0.5, -0.25}, at::kDouble).view({1, 2}));
  trainer.prepare(model);
  optim::SGD optimizer(parameters(*model), {.lr = 0.125});
  trainer.prepare(optimizer);
  const auto rank = world.rank();
  const auto open = [rank](int64_t /*epoch*/) {
    return [rank, batch = 0]() mutable -> std::optional<data::Samples> {
      if (batch == 1 + 2 * rank) return std::nullopt;
      const auto rows = at::tensor({rank + 1.0, static_cast<double>(batch++), 1.0, 2.0}, at::kDouble).view({2, 2});
      return data::Samples{.inputs = rows, .targets = {}};
    };
  };
  data::Loader loader(data::Stream({.open = open, .global_batch = 2}), {.join = world});
  trainer.prepare(loader);
  for (const auto& batch : loader) {
    trainer.backward(model(batch.inputs).pow(2).mean());
    trainer.step();
  }
  return (whole_values(*model).front() * 1e9).round();
}

/// Makes the same calls as accelerate_ranks.py.
std::string results(const Trainer& trainer) {
  Lines lines;
  const auto& world = trainer.world();
  add_streams(trainer, lines);
  lines.add("joined", trained_on_streams_of_different_lengths(world));
  for (const auto& [size, batch] : kSizes) {
    data::Loader loader(data::Sampler({.size = size,
                                       .global_batch = batch * world.size(),
                                       .local_ranks = world.local_ranks(),
                                       .ranks = world.size(),
                                       .order = data::Order::AsStored,
                                       .tail = data::Tail::Fill}),
                        [](std::span<const int64_t> numbers) {
                          const auto inputs = at::tensor(numbers, at::kLong);
                          return data::Samples{.inputs = inputs, .targets = 2 * inputs};
                        },
                        {.workers = 0});
    std::vector<at::Tensor> inputs, targets;
    for (const auto& rows : loader) {
      const auto [own_inputs, own_targets] = trainer.gather_for_metrics({rows.inputs, rows.targets}, rows);
      inputs.push_back(own_inputs);
      targets.push_back(own_targets);
    }
    const auto name = "gather_for_metrics " + std::to_string(size) + ' ' + std::to_string(batch);
    lines.add(name + " 0", at::cat(inputs));
    lines.add(name + " 1", at::cat(targets));
  }
  const auto rank = trainer.process_index();
  const auto own = at::arange(6).view({2, 3}) + 10 * rank;
  lines.add("gather", trainer.gather(own));
  lines.add("gather number", trainer.gather(at::scalar_tensor(rank + 3, at::kLong)));
  lines.add("reduce sum", trainer.reduce(own.to(at::kFloat)));
  lines.add("reduce mean", trainer.reduce(own.to(at::kFloat), Reduce::Mean));
  const auto uneven = at::arange(2 * (3 + rank)).view({2, -1});
  lines.add("pad 0", trainer.pad_across_processes(uneven, {.dim = 1, .pad_index = 7}));
  lines.add("pad 1", trainer.pad_across_processes(uneven, {.dim = -1, .pad_index = 7, .pad_first = true}));
  for (int length = 0; length < 6; length++)
    lines.add("split " + std::to_string(length), trainer.split_between_processes(at::arange(length)));
  static std::mutex of_the_process;  // the generator
  const std::lock_guard lock(of_the_process);
  for (const bool device_specific : {false, true}) {
    trainer.set_seed(41, {.device_specific = device_specific});
    lines.add(device_specific ? "seed 1" : "seed 0", at::randint(1000000, {4}));
  }
  return lines.text();
}

TEST(TrainerAndAccelerate, GiveTheSame) {
  const Folder folder;
  const auto [status, output] = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/accelerate_ranks.py", folder.path()});
  if (status == 77) GTEST_SKIP() << "build/python has no package accelerate";
  ASSERT_EQ(status, 0) << output;
  with_ranks(2, [&](const Communicator& world) {
    const Trainer trainer(options_for(world));
    EXPECT_EQ(results(trainer), read_file(folder / ("rank-" + std::to_string(world.rank()))));
  });
}

}  // namespace
}  // namespace tessera::testing::trainer_accelerate_test
