// Functions of the Trainer across ranks, besides training: gather rows, let one rank work before the others, and log numbers.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <nlohmann/json.hpp>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/peft.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/threads/run_ranks.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/trained.h"

namespace tessera::testing::trainer_ranks_test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

/// The lines that are logged while the object lives.
class Logged {
 public:
  Logged() : before_(set_log_sink([this](const LogRecord& record) { lines.emplace_back(record.text); })) {}
  Logged(const Logged&) = delete;
  Logged& operator=(const Logged&) = delete;
  ~Logged() { set_log_sink(before_); }
  std::vector<std::string> lines;

 private:
  LogSink before_;
};

// Rows that fill the last batch are left out, for every way of filling it.
TEST(TrainerRanks, GatherEachSampleOnce) {
  for (const int ranks : {1, 2, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      const Trainer trainer(options_for(world));
      for (int size = 1; size < 14; size++) {
        for (int batch = 1; batch < 5; batch++) {
          data::Loader loader(data::Sampler({.size = size,
                                             .global_batch = batch * ranks,
                                             .local_ranks = world.local_ranks(),
                                             .ranks = ranks,
                                             .order = data::Order::AsStored,
                                             .tail = data::Tail::Fill}),
                              [](std::span<const int64_t> numbers) { return data::Samples{.inputs = at::tensor(numbers), .targets = {}}; },
                              {.workers = 0});
          std::vector<at::Tensor> all;
          for (const auto& samples : loader) all.push_back(trainer.gather_for_metrics(samples.inputs, samples));
          EXPECT_TRUE(torch::equal(at::cat(all), at::arange(size))) << size << ' ' << batch;
        }
      }
    });
  }
}

TEST(TrainerRanks, RefuseRowsThatAreNoSamples) {
  with_ranks(2, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    const data::Samples batch{.inputs = at::zeros({4, 3}), .targets = {}, .repeats = world.rank()};
    const auto message = message_of<UsageError>([&] { trainer.gather_for_metrics(at::zeros({world.is_first() ? 4 : 12}), batch); });
    EXPECT_THAT(message, HasSubstr("rank 1 has 12 rows of a batch of 4"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.gather_for_metrics(at::zeros({}), batch); }), HasSubstr("rank 0 has a single number"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.gather_for_metrics({at::zeros({4}), at::zeros({3})}, batch); }),
                HasSubstr("tensors of different lengths"));
    const auto any = trainer.gather_for_metrics(at::full({1 + world.rank()}, world.rank()), {});
    EXPECT_TRUE(torch::equal(any, at::tensor({0, 1, 1})));
    // The same count of numbers in another shape would end up in the wrong places.
    EXPECT_THAT(message_of<CommError>([&] { trainer.gather(world.is_first() ? at::zeros({2, 3}) : at::zeros({3, 2})); }),
                AllOf(HasSubstr("gather of {2, 3}"), HasSubstr("gather of {3, 2}")));
    EXPECT_THAT(message_of<CommError>([&] { trainer.reduce(world.is_first() ? at::zeros({2, 3}) : at::zeros({3, 2})); }),
                HasSubstr("reduce of {3, 2}"));
  });
}

TEST(TrainerRanks, RefuseTensorsThatTheyCanNotPadOrSplit) {
  with_ranks(2, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    // Checked before any exchange, so that all ranks throw, also the one that needs no padding.
    const auto own = at::zeros({2 + world.rank(), 3}, at::kLong), small = at::zeros({2 + world.rank()}, at::kByte);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(own, {.pad_index = 0.5}); }),
                HasSubstr("can't fill a tensor of Long with 0.5"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(small, {.pad_index = -1}); }),
                HasSubstr("can't fill a tensor of Byte with -1"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(small, {.pad_index = 256}); }), HasSubstr("with 256"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(small.to(at::kBool), {.pad_index = 2}); }), HasSubstr("with 2"));
    EXPECT_EQ(trainer.pad_across_processes(own, {.pad_index = -100}).min().item<int64_t>(), world.is_first() ? -100 : 0);
    EXPECT_EQ(trainer.pad_across_processes(small.to(at::kFloat), {.pad_index = 0.5}).size(0), 3);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(own, {.dim = 2}); }), HasSubstr("dimension 2 of a tensor"));
    const at::Tensor none, number = at::zeros({});
    EXPECT_THAT(message_of<UsageError>([&] { trainer.pad_across_processes(number); }), HasSubstr("a single number"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.split_between_processes(number); }), HasSubstr("a single number"));
    for (const auto& act :
         {std::function([&] { trainer.pad_across_processes(none); }), std::function([&] { trainer.split_between_processes(none); }),
          std::function([&] { trainer.gather(none); }), std::function([&] { trainer.reduce(none); }),
          std::function([&] { trainer.gather_for_metrics(none, {}); })})
      EXPECT_THAT(message_of<UsageError>(act), HasSubstr("an undefined tensor"));
  });
}

TEST(TrainerRanks, ReduceAndSplit) {
  with_ranks(3, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    const auto own = at::tensor({1.0, 10.0}) * (world.rank() + 1);
    EXPECT_TRUE(torch::equal(trainer.reduce(own), at::tensor({6.0, 60.0})));
    EXPECT_TRUE(torch::equal(trainer.reduce(own.t(), Reduce::Mean), at::tensor({2.0, 20.0})));
    EXPECT_TRUE(torch::equal(trainer.reduce(own, Reduce::Max), at::tensor({3.0, 30.0})));
    EXPECT_TRUE(torch::equal(own, at::tensor({1.0, 10.0}) * (world.rank() + 1)));  // which has not changed
    const std::vector<std::string> prompts = {"a", "b", "c", "d"};
    const auto mine = trainer.split_between_processes(prompts);
    EXPECT_EQ(std::vector<std::string>(mine.begin(), mine.end()),
              std::vector<std::vector<std::string>>({{"a", "b"}, {"c"}, {"d"}})[static_cast<size_t>(world.rank())]);
    EXPECT_EQ(trainer.local_process_index(), world.rank());
    EXPECT_EQ(trainer.is_last_process(), world.rank() == 2);
  });
}

TEST(TrainerRanks, GoAfterTheFirst) {
  std::atomic<int> done = 0;
  with_ranks(3, [&](const Communicator& world) {
    const Trainer trainer(options_for(world));
    const auto place = trainer.main_process_first([&] { return ++done; });
    EXPECT_EQ(place == 1, world.is_first());
    trainer.local_main_process_first([&] { ++done; });
    trainer.wait_for_everyone();
    EXPECT_EQ(done, 6);
    trainer.wait_for_everyone();
    const auto message = message_of<IoError>([&] {
      trainer.main_process_first([&] {
        ++done;
        throw IoError("the disk is full");
      });
    });
    EXPECT_THAT(message, HasSubstr("the disk is full"));
    trainer.wait_for_everyone();
    EXPECT_EQ(done, 7);  // the others did not begin
  });
}

TEST(TrainerRanks, GoAfterTheFirstOfTheirHost) {
  std::array<std::atomic<int>, 2> done = {};
  run_ranks(
      4,
      [&](const Communicator& world) {
        const Trainer trainer(options_for(world));
        const auto host = static_cast<size_t>(world.rank() / 2);
        EXPECT_EQ(trainer.local_process_index(), world.rank() % 2);
        const auto place = trainer.local_main_process_first([&] { return ++done[host]; });
        EXPECT_EQ(place == 1, trainer.is_local_main_process());
      },
      {.host_of = {0, 0, 1, 1}});
}

TEST(TrainerRanks, HearATriggerOnce) {
  with_ranks(3, [](const Communicator& world) {
    Trainer trainer(options_for(world));
    EXPECT_FALSE(trainer.check_trigger());
    if (world.rank() == 1) trainer.set_trigger();
    EXPECT_TRUE(trainer.check_trigger());
    EXPECT_FALSE(trainer.check_trigger());
  });
}

/// Keeps the reports that it is given.
struct Kept : train::Reporter {
  explicit Kept(std::vector<int64_t>& steps) : steps_(steps) {}
  void write(int64_t step, const train::Values&) override { steps_.push_back(step); }

 private:
  std::vector<int64_t>& steps_;
};

TEST(TrainerRanks, LogEachStepOnceOverResumes) {
  const Folder folder;
  std::vector<int64_t> told;
  with_ranks(2, [&](const Communicator& world) {
    const auto run = [&](bool resumes, int saves_after, int steps) {
      auto options = options_for(world);
      options.log_with = {folder / "run/log.jsonl"};
      Trainer trainer(options);
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      if (world.is_first()) trainer.add_tracker(std::make_unique<Kept>(told));
      EXPECT_EQ(trainer.has_state(folder / "state"), resumes);
      if (resumes) trainer.load_state(folder / "state");
      for (int step = 0; step < steps; step++) {
        trainer.backward(squared_output(net, static_cast<int64_t>(trainer.steps())));
        trainer.step();
        trainer.log({{"run", resumes ? 2.0 : 1.0}});
        if (trainer.steps() == saves_after) trainer.save_state(folder / "state");
      }
      if (resumes) {  // back in the same process
        trainer.load_state(folder / "state");
        trainer.log({{"run", 3.0}}, 3);
      }
      trainer.end_training();
      if (resumes || !world.is_first()) return;
      trainer.log({{"last", 1.0}});  // which opens the files again
      EXPECT_THAT(read_file(folder / "run/log.jsonl"), HasSubstr("{\"step\":4,\"run\":1}\n{\"step\":4,\"last\":1}\n"));
    };
    run(false, 2, 4);
    run(true, 0, 3);
  });
  EXPECT_EQ(read_file(folder / "run/log.jsonl"), "{\"step\":1,\"run\":1}\n{\"step\":2,\"run\":1}\n{\"step\":3,\"run\":3}\n");
  EXPECT_THAT(told, ElementsAre(1, 2, 3, 4, 3, 4, 5, 3));
  ::setenv("TESSERA_RECORD", (folder / "recorded").c_str(), 1);
  with_ranks(2, [&](const Communicator& world) { Trainer(options_for(world)).log({{"loss", 0.5}}, 7); });
  EXPECT_EQ(read_file(folder / "recorded/metrics.jsonl"), "{\"step\":7,\"loss\":0.5}\n");
  with_ranks(2, [&](const Communicator& world) { Trainer(options_for(world)).log({{"loss", 0.25}}, 1); });
  EXPECT_EQ(read_file(folder / "recorded/metrics.jsonl"), "{\"step\":1,\"loss\":0.25}\n");
  EXPECT_EQ(read_file(folder / "recorded/metrics-1.jsonl"), "{\"step\":7,\"loss\":0.5}\n");  // of the earlier attempt
  std::filesystem::create_directory(folder / "full");
  std::filesystem::create_symlink("/dev/full", folder / "full/metrics.jsonl");
  const Logged logged;
  for (const auto* where : {"full", "run/log.jsonl"}) {  // a full disk, and a file in place of the folder
    ::setenv("TESSERA_RECORD", (folder / where).c_str(), 1);
    with_ranks(1, [&](const Communicator& world) {
      Trainer trainer(options_for(world));
      for (int step = 1; step <= 2; step++) trainer.log({{"loss", 0.5}}, step);
    });
  }
  ::unsetenv("TESSERA_RECORD");
  EXPECT_THAT(logged.lines, ElementsAre(HasSubstr("No space left"), HasSubstr("metrics.jsonl")));
  with_ranks(2, [&](const Communicator& world) {
    auto options = options_for(world);
    options.log_with = {"metrics.txt"};
    EXPECT_THAT(message_of<ConfigError>([&] { const Trainer trainer(options); }), HasSubstr("does not say what metrics are written as"));
  });
}

TEST(TrainerRanks, WriteWhatARankDoes) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    {
      const auto profile = trainer.profile({.output_trace_dir = folder / "trace", .profile_memory = true, .with_flops = true});
      EXPECT_EQ(profile.path(), folder / "trace/profile_0.json");
      trainer.backward(squared_output(net, 1));
      trainer.step();
      EXPECT_THAT(message_of<UsageError>([&] { const auto second = trainer.profile({.output_trace_dir = folder / "other"}); }),
                  HasSubstr("another one runs"));
    }
    const auto trace = read_file(folder / "trace/profile_0.json");
    for (const auto* name : {"traceEvents", "aten::addmm", "AddmmBackward0", "tessera::unshard ", "tessera::reduce ", "tessera::step"})
      EXPECT_THAT(trace, HasSubstr(name));
    // The record and the profiler have the same clock: for both, the first wait of one is before the step of the other.
    const auto events = nlohmann::json::parse(trace).at("traceEvents");
    const auto time_of = [&](const char* category, const std::string& start) {
      return std::ranges::find_if(events, [&](const auto& event) {
               return event.value("cat", "") == category && event.at("name").template get<std::string>().starts_with(start);
             })
          ->at("ts")
          .template get<double>();
    };
    EXPECT_LT(time_of("unshard", "unshard"), time_of("user_annotation", "tessera::step"));
    EXPECT_LT(time_of("user_annotation", "tessera::unshard "), time_of("optimizer", "optimizer"));
    {
      auto next = trainer.profile({.output_trace_dir = folder / "next"});
      squared_output(net, 1);
      std::filesystem::remove_all(folder / "next");
      EXPECT_THAT(message_of<IoError>([&] { next.finish(); }), HasSubstr("could not be written to"));
    }
    write_file(folder / "file", "");
    message_of<IoError>([&] { const auto none = trainer.profile({.output_trace_dir = folder / "file"}); });
  });
}

TEST(TrainerRanks, SeedGenerators) {
  with_ranks(1, [](const Communicator& world) {
    const Trainer trainer(options_for(world));
    trainer.set_seed(7, {.device_specific = true, .deterministic = true});
    const auto drawn = at::rand({3});
    EXPECT_TRUE(at::globalContext().deterministicAlgorithms());
    at::globalContext().setDeterministicAlgorithms(false, false);
    torch::manual_seed(7);
    EXPECT_TRUE(torch::equal(at::rand({3}), drawn));
  });
}

TEST(TrainerRanks, ForgetWhatWasPrepared) {
  with_ranks(2, [](const Communicator& world) {
    Trainer trainer(options_for(world));
    for (int fold = 0; fold < 2; fold++) {
      auto net = seeded_net();
      auto loader = numbers_loader(world, 8);
      const std::weak_ptr<torch::nn::Module> module = net.ptr();
      {
        trainer.prepare(net, loader);
        optim::SGD optimizer(parameters(*net), {.lr = 0.1});
        trainer.prepare(optimizer);
        trainer.backward(squared_output(net, 1));
        EXPECT_TRUE(trainer.step());
        EXPECT_EQ(trainer.steps(), 1);
        trainer.free_memory();
        EXPECT_EQ(trainer.steps(), 0);
      }
      net = nullptr;
      EXPECT_TRUE(module.expired());
    }
  });
}

struct TiedImpl : torch::nn::Module {
  torch::nn::Linear one{nullptr};
  at::Tensor again;
  TiedImpl() {
    one = register_module("one", torch::nn::Linear(12, 12));
    again = register_parameter("again", one->weight);
  }
};
TORCH_MODULE(Tied);

TEST(TrainerRanks, SaveTheAdaptersOfAModelForOthers) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto options = options_for(world);
    options.settings = {{"tessera_lora_target_modules", "a"}, {"tessera_lora_modules_to_save", "b"}};
    options.defaults = {{"tessera_lora_r", "2"}};  // of what the settings leave open
    Trainer trainer(options);
    auto net = seeded_net();
    trainer.prepare(net);
    trainer.save_model(net, folder / "adapter");
  });
  const auto adapter = checkpoint::read_adapter(folder / "adapter");
  EXPECT_EQ(adapter.options.r, 2);
  EXPECT_EQ(adapter.layers.size(), 1);
  EXPECT_THAT(adapter.options.modules_to_save, ::testing::ElementsAre("b"));
  EXPECT_FALSE(adapter.others.empty());
  EXPECT_FALSE(std::filesystem::exists(folder / "adapter/model.safetensors"));
}

TEST(TrainerRanks, SaveAModelForOthers) {
  const Folder folder;
  auto plain = seeded_net();
  Tied tied;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    trainer.save_model(net, folder / "whole");
    trainer.save_model(net, folder / "parts", {.max_shard_size = 300});
    Tied other;
    at::Tensor(other->one->weight.detach()).fill_(2);
    trainer.prepare(other);
    trainer.save_model(other, folder / "tied");
    write_file(folder / "file", "");
    message_of<IoError>([&] { trainer.save_model(net, folder / "file"); });
  });
  for (const auto* name : {"whole", "parts"}) {
    Net read;
    checkpoint::load_weights(*read, folder / name);
    expect_same(whole_values(*read), whole_values(*plain));
  }
  EXPECT_TRUE(std::filesystem::exists(folder / "whole/model.safetensors"));
  EXPECT_TRUE(std::filesystem::exists(folder / "parts/model.safetensors.index.json"));
  checkpoint::load_weights(*tied, folder / "tied");
  EXPECT_TRUE(tied->again.eq(2).all().item<bool>());
  EXPECT_LT(std::filesystem::file_size(folder / "tied/model.safetensors"), 1000U);
}

TEST(TrainerRanks, SayWhichLimitOfGradientsHolds) {
  Logged logged;
  with_ranks(2, [](const Communicator& world) {
    for (const auto* limit : {"0.5", "1"}) {
      Trainer trainer(options_for(world, {{"gradient_clipping", limit}}));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      for (int step = 0; step < 2; step++) {
        trainer.backward(squared_output(net, step));
        trainer.clip_grad_norm(1);
        trainer.step();
      }
    }
  });
  EXPECT_THAT(logged.lines, ElementsAre(AllOf(HasSubstr("gradient_clipping is 0.5 (TrainerOptions::settings)"), HasSubstr("to 1 by"))));
}

// The limit of values applies to gradients without the scale that they have while float16 computes them.
TEST(TrainerRanks, LimitEachValue) {
  with_ranks(2, [](const Communicator& world) {
    for (const auto* precision : {"no", "fp16"}) {
      Trainer trainer(options_for(world, {{"mixed_precision", precision}}));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 1});
      trainer.prepare(optimizer);
      const auto before = whole_values(*net);
      trainer.backward(squared_output(net, 1).to(at::kFloat) * 0.01);
      trainer.clip_grad_value(1e-5);
      EXPECT_TRUE(trainer.step());
      const auto after = whole_values(*net);
      double most = 0;
      for (size_t i = 0; i < before.size(); i++) most = std::max(most, (after[i] - before[i]).abs().max().item<double>());
      EXPECT_NEAR(most, 1e-5, 1e-6) << precision;
    }
  });
}

}  // namespace
}  // namespace tessera::testing::trainer_ranks_test
