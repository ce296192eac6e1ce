// A Run adds to a loop: an end, checkpoints, resumption, reports.
#include "tessera/train/run.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <csignal>
#include <fstream>
#include <nlohmann/json.hpp>
#include <numeric>

#include "tessera/base/error.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tessera/simulate/flops.h"
#include "tessera/train/utilisation.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/trained.h"
#include "tests/testing/warnings.h"

namespace tessera::train::run_test {
namespace {

using namespace tessera::testing;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBatches = 6;  // of an epoch

struct Ended {
  std::vector<double> losses = {};  // of the steps that were taken
  int64_t epochs = 0;               // how many were begun
  bool stopped = false;
};

using AfterStep = std::function<void(Run& run, int64_t step)>;

Ended trained(const Communicator& world, const RunOptions& options, const AfterStep& after_step = {}, TrainerOptions trainer_options = {},
              uint64_t seed = 0, int64_t global_batch = 2) {
  trainer_options.world = world;
  Trainer trainer(trainer_options);
  auto net = seeded_net();
  data::Loader loader(
      trainer.make_sampler({.size = kBatches * 2, .global_batch = global_batch, .seed = seed}),
      [](std::span<const int64_t> numbers) { return data::Samples{.inputs = at::tensor(numbers, at::kLong), .targets = {}}; });
  trainer.prepare(net, loader);
  optim::SGD optimizer(parameters(*net), {.lr = 0.1});
  trainer.prepare(optimizer);
  Run run(trainer, loader, options);
  Ended ended;
  while (run.next_epoch()) {
    EXPECT_EQ(run.epoch(), loader.position().epoch + 1);
    ended.epochs++;
    for (const auto& batch : run.batches()) {
      const auto loss = squared_output(net, batch.inputs[0].item<int64_t>());
      trainer.backward(loss);
      trainer.step();
      ended.losses.push_back(loss.item<double>());
      run.report({{"loss", loss}, {"nothing", {}}});
      if (after_step) after_step(run, trainer.steps());
    }
  }
  ended.stopped = run.stopped();
  return ended;
}

std::vector<int64_t> steps_in(const std::filesystem::path& prefix) {
  std::vector<int64_t> steps;
  for (const auto& each : checkpoint::step_folders(prefix)) {
    if (checkpoint::is_complete(each.folder)) steps.push_back(each.step);
  }
  return steps;
}

std::string refusal(const Communicator& world, const RunOptions& options, uint64_t seed = 0) {
  try {
    trained(world, options, {}, {}, seed);
  } catch (const Error& error) {
    return error.what();
  }
  return "nothing was refused";
}

TEST(Run, EndsByEpochsOrSteps) {
  with_ranks(2, [](const Communicator& world) {
    EXPECT_EQ(trained(world, {.epochs = 0}).losses.size(), 0);
    EXPECT_EQ(trained(world, {.epochs = 1, .steps = 0}).losses.size(), 0);
    EXPECT_EQ(trained(world, {.epochs = 2}).losses.size(), 2 * kBatches);
    const auto some = trained(world, {.steps = kBatches + 2});
    EXPECT_EQ(some.losses.size(), kBatches + 2);
    EXPECT_EQ(some.epochs, 2);
    EXPECT_EQ(trained(world, {.epochs = 1, .steps = 2}).losses.size(), 2);
  });
}

TEST(Run, WritesATraceOfAFewBatches) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    for (const auto& options : {RunOptions{.epochs = 2}, RunOptions{.steps = 5}}) {  // the second ends before the trace does
      auto traced = options;
      traced.trace = folder / fmt::format("{}", options.epochs.has_value());
      trained(world, traced);
      std::ifstream file(traced.trace / "profile_0.json");
      const auto events = nlohmann::json::parse(file).at("traceEvents");
      const auto steps = std::ranges::count_if(events, [](const auto& event) { return event.value("name", "") == "tessera::step"; });
      EXPECT_EQ(steps, options.epochs ? 3 : 2);  // of batches 4 to 6, with which the epoch ends
    }
  });
}

TEST(Run, SavesWhereItIsToldAndKeepsSome) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto saved = [&](RunOptions options, const AfterStep& after_step = {}) {
      options.prefix = folder / fmt::format("{}-{}-{}", options.save_epochs, options.save_every, options.save_beside);
      if (options.keep) options.prefix += "-some";
      trained(world, options, after_step);
      world.barrier();
      return steps_in(options.prefix);
    };
    EXPECT_THAT(saved({.epochs = 2}), ElementsAre(6, 12));
    EXPECT_THAT(saved({.epochs = 2, .save_every = 4}), ElementsAre(4, 6, 8, 12));
    EXPECT_THAT(saved({.epochs = 2, .save_beside = true}), ElementsAre(6, 12));
    EXPECT_THAT(saved({.steps = 8, .save_epochs = false}), ElementsAre(8));  // a run that ends within an epoch would lose steps
    EXPECT_THAT(saved({.epochs = 3, .keep = checkpoint::Keep{.last = 2}}), ElementsAre(12, 18));
    EXPECT_THAT(saved({.epochs = 2, .save_every = 6, .keep = checkpoint::Keep{.best = 1, .metric = "accuracy"}}), ElementsAre(12));
    EXPECT_THAT(saved({.epochs = 2, .save_epochs = false, .save_every = 6}), ElementsAre(6, 12));
    const auto by_itself = [](train::Run& run, int64_t step) {
      if (step == 3) run.save({{"accuracy", 0.5}});
    };
    EXPECT_THAT(saved({.epochs = 1, .save_epochs = false, .save_every = 5}, by_itself), ElementsAre(3, 5, 6));
    EXPECT_THAT(checkpoint::inspect(checkpoint::step_folder(folder / "false-5-false", 3)), HasSubstr("accuracy"));
  });
}

TEST(Run, DoesNotBeginAnewBesideCheckpointsThatAreDamaged) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    const RunOptions options{.epochs = 2, .prefix = folder / "net", .resume = true};
    trained(world, options);
    for (const auto step : steps_in(options.prefix))
      std::filesystem::resize_file(checkpoint::step_folder(options.prefix, step) / "rank-0-of-1.safetensors", 10);
    EXPECT_THAT(refusal(world, options), HasSubstr("of 2 checkpoints under"));
  });
}

/// Flips a bit in the last tensor of a rank.
void damage(const std::filesystem::path& prefix, int64_t step) {
  const auto file = checkpoint::step_folder(prefix, step) / "rank-1-of-2.safetensors";
  auto bytes = read_file(file);
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(file, bytes);
}

TEST(Run, GoesBackToTheCheckpointBeforeOneThatIsDamaged) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const RunOptions options{.epochs = 3, .prefix = folder / "net", .resume = true};
    const auto all = trained(world, options).losses;
    world.barrier();
    if (world.is_first()) {
      for (const int64_t step : {12, 18}) damage(options.prefix, step);
    }
    world.barrier();
    const auto again = trained(world, options).losses;
    EXPECT_EQ(again, std::vector(all.begin() + kBatches, all.end()));
    world.barrier();
    EXPECT_THAT(steps_in(options.prefix), ElementsAre(6, 12, 18));
    EXPECT_TRUE(trained(world, options).losses.empty());
    world.barrier();
    if (world.is_first()) {
      for (const int64_t step : {6, 12, 18}) damage(options.prefix, step);
    }
    world.barrier();
    EXPECT_THAT(refusal(world, options), AllOf(HasSubstr("net-step-000018/rank-1-of-2.safetensors is damaged"),
                                               HasSubstr("no checkpoint before"), HasSubstr("can be loaded")));
  });
  EXPECT_THAT(steps_in(folder / "net"), ElementsAre(6, 12, 18));
  for (const auto* name : {"net-step-000012.damaged", "net-step-000018.damaged"}) EXPECT_TRUE(std::filesystem::is_directory(folder / name));
}

TEST(Run, GoesOnWithTheLossesOfOneThatWentThrough) {
  const Folder folder;
  Ended through;
  with_ranks(2, [&](const Communicator& world) {
    const auto all = trained(world, {.epochs = 3});
    if (world.rank() == 0) through = all;
    auto first = trained(world, {.steps = 8, .prefix = folder / "net"}).losses;
    const auto then = trained(world, {.epochs = 3, .prefix = folder / "net", .resume = true});
    EXPECT_EQ(then.epochs, 2);
    first.insert(first.end(), then.losses.begin(), then.losses.end());
    EXPECT_EQ(first, all.losses);
    EXPECT_TRUE(trained(world, {.epochs = 3, .prefix = folder / "net", .resume = true}).losses.empty());
  });
  with_ranks(1, [&](const Communicator& world) {  // half of the ranks have the same batches, each of two samples
    EXPECT_EQ(trained(world, {.epochs = 4, .prefix = folder / "net", .resume = true}).losses.size(), kBatches);
  });
}

TEST(Run, SavesUnderHigherNumbersWhenLargerBatchesCountAsFewerSteps) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    trained(world, {.epochs = 2, .prefix = folder / "net"});
    EXPECT_EQ(trained(world, {.epochs = 3, .prefix = folder / "net", .resume = true}, {}, {}, 0, 4).losses.size(), kBatches / 2);
    EXPECT_EQ(trained(world, {.epochs = 4, .prefix = folder / "net", .resume = true}, {}, {}, 0, 4).losses.size(), kBatches / 2);
  });
  EXPECT_THAT(steps_in(folder / "net"), ElementsAre(6, 12, 15, 18));
}

TEST(Run, ShowsTheStepsOfTheWholeEpochAlsoAfterBatchesOfAnotherSize) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    trained(world, {.steps = 3, .prefix = folder / "net"});  // ends after 6 of 12 samples, which are one and a half batches of 4
    ::testing::internal::CaptureStdout();
    trained(world, {.epochs = 1, .prefix = folder / "net", .resume = true}, {}, {}, 0, 4);
    EXPECT_THAT(::testing::internal::GetCapturedStdout(), HasSubstr("epoch 1/1 step 3/3"));
  });
}

TEST(Run, WarnsWhereCheckpointsWithOtherPrefixesAreThere) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto begin = [&](const char* prefix) { trained(world, {.epochs = 1, .prefix = folder / prefix, .resume = true}); };
    const auto warned = [&](const char* prefix) {
      std::optional<Warnings> warnings;
      if (world.is_first()) warnings.emplace();
      world.barrier();
      begin(prefix);
      world.barrier();
      return warnings ? warnings->texts : std::vector<std::string>();
    };
    EXPECT_THAT(warned("mnist"), Not(Contains(HasSubstr("starts anew"))));
    begin("zebra");
    const auto texts = warned("minst"), none = warned("minst"), far = warned("other");
    if (!world.is_first()) return;
    EXPECT_THAT(texts, Contains(AllOf(HasSubstr("minst-step-N to resume from, so the run starts anew"),
                                      HasSubstr(folder.path().string() + " has checkpoints with the prefixes 'mnist', 'zebra'"),
                                      HasSubstr("did you mean --ckpt-prefix " + (folder / "mnist").string() + "?"))));
    EXPECT_THAT(none, Not(Contains(HasSubstr("starts anew"))));
    EXPECT_THAT(far, Contains(AllOf(HasSubstr("starts anew"), Not(HasSubstr("did you mean")))));
  });
}

TEST(Run, EndsAfterTheStepInWhichASignalComes) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const RunOptions options{.epochs = 2, .prefix = folder / "net", .resume = true, .signals = {SIGUSR1}};
    const auto first = trained(world, options, [&](train::Run&, int64_t step) {
      if (step == 2 && world.rank() == 1) std::raise(SIGUSR1);
    });
    EXPECT_TRUE(first.stopped);
    EXPECT_EQ(first.losses.size(), 2);
    const auto at_the_end = trained(world, options, [&](train::Run&, int64_t step) {
      if (step == kBatches && world.rank() == 0) std::raise(SIGUSR1);
    });
    EXPECT_EQ(at_the_end.losses.size(), kBatches - 2);
    EXPECT_TRUE(at_the_end.stopped);
    const auto rest = trained(world, options);
    EXPECT_FALSE(rest.stopped);
    EXPECT_EQ(rest.losses.size(), kBatches);
  });
  EXPECT_THAT(steps_in(folder / "net"), ElementsAre(2, 6, 12));
}

TEST(Run, EndsWhereTheProgramSaysSo) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const RunOptions options{.epochs = 2, .prefix = folder / "net", .resume = true};
    const auto first = trained(world, options, [](train::Run& run, int64_t step) {
      if (step == 4) run.stop();
    });
    EXPECT_TRUE(first.stopped);
    EXPECT_EQ(first.losses.size(), 4);
    const auto second = trained(world, options, [](train::Run& run, int64_t step) {
      if (step == 10) run.save({{"accuracy", 0.5}});
    });
    EXPECT_EQ(second.losses.size(), 2 * kBatches - 4);
    trained(world, {.epochs = 3, .prefix = folder / "net", .resume = true}, [](train::Run& run, int64_t step) {
      if (step > 13) return;
      run.save();
      run.save({{"accuracy", 0.5}});  // too late, so the run warns
    });
  });
  EXPECT_THAT(steps_in(folder / "net"), ElementsAre(4, 6, 10, 12, 13, 18));
  EXPECT_THAT(checkpoint::inspect(checkpoint::step_folder(folder / "net", 10)), HasSubstr("accuracy"));
  EXPECT_THAT(checkpoint::inspect(checkpoint::step_folder(folder / "net", 13)), Not(HasSubstr("accuracy")));
}

TEST(Run, KeepsTheBestAndEndsWithoutPatience) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    // The values of evaluations: the best one is that of step 4, and the three after it do not improve it.
    const std::map<int64_t, double> values = {{2, 0.9}, {4, 0.5}, {6, 0.7}, {8, 0.6}, {10, 0.55}, {12, 0.1}};
    std::vector<int64_t> best;
    std::optional<std::filesystem::path> kept;
    const auto evaluates = [&](train::Run& run, int64_t step) {
      if (run.should_evaluate() && run.evaluated({{"eval_loss", values.at(step)}})) best.push_back(step);
      kept = run.best_checkpoint();
    };
    RunOptions options{
        .epochs = 2, .prefix = folder / "run", .keep = checkpoint::Keep{.best = 1, .metric = "eval_loss"}, .evaluate_every = 2, .patience = 3};
    auto first = options;
    first.steps = 8;
    EXPECT_EQ(trained(world, first, evaluates).losses.size(), 8);
    world.barrier();
    EXPECT_THAT(steps_in(options.prefix), ElementsAre(4, 8));
    options.resume = true;
    EXPECT_EQ(trained(world, options, evaluates).losses.size(), 2);  // up to step 10
    EXPECT_THAT(best, ElementsAre(2, 4));
    EXPECT_EQ(kept, checkpoint::step_folder(options.prefix, 4));
    EXPECT_EQ(trained(world, options, evaluates).losses.size(), 0);
    options.patience = 4;
    EXPECT_EQ(trained(world, options, evaluates).losses.size(), 2);
    EXPECT_THAT(best, ElementsAre(2, 4, 12));
    world.barrier();
    EXPECT_THAT(steps_in(options.prefix), ElementsAre(12));
    EXPECT_THAT(refusal(world, {.epochs = 1, .patience = -1}), HasSubstr("a patience of -1"));
  });
  with_ranks(1, [&](const Communicator& world) {  // without checkpoints, too, and at the end of epochs
    int64_t evaluations = 0;
    const auto evaluates = [&](train::Run& run, int64_t) {
      if (run.should_evaluate()) run.evaluated({{"accuracy", evaluations++ == 1 ? std::nan("") : 1}});
    };
    EXPECT_EQ(trained(world, {.epochs = 9, .patience = 2}, evaluates).losses.size(), 3 * kBatches);
    EXPECT_EQ(evaluations, 3);
  });
}

TEST(Run, TakesTheStepToItsEndBeforeItStops) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world, {{"gradient_accumulation_steps", "4"}}));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 20);
    trainer.prepare(net, loader);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    train::Run run(trainer, loader, {.epochs = 1, .prefix = folder / "net", .save_epochs = false});
    int64_t batches = 0;
    while (run.next_epoch()) {
      for (const auto& batch : run.batches()) {
        const auto accumulation = trainer.accumulate();
        trainer.backward(squared_output(net, batch.inputs[0].item<int64_t>()));
        trainer.step();
        if (++batches == 2) run.stop();
      }
    }
    EXPECT_EQ(batches, 4);
    EXPECT_EQ(trainer.steps(), 1);
  });
  EXPECT_THAT(steps_in(folder / "net"), ElementsAre(1));
}

TEST(Run, ReportsMeansOverRanksWhenTheyAreDue) {
  const Folder folder;
  std::vector<std::vector<double>> losses(2);
  with_ranks(2, [&](const Communicator& world) {
    losses[static_cast<size_t>(world.rank())] =
        trained(world, {.epochs = 1, .report_every = 4}, {}, {.log_with = {(folder / "log.jsonl").string()}}).losses;
  });
  std::ifstream file(folder / "log.jsonl");
  std::string line, more;
  ASSERT_TRUE(std::getline(file, line));
  EXPECT_FALSE(std::getline(file, more));
  const auto row = nlohmann::json::parse(line);
  EXPECT_EQ(row.at("step"), 4);
  EXPECT_FLOAT_EQ(row.at("loss").get<float>(), static_cast<float>((losses[0][3] + losses[1][3]) / 2));
  EXPECT_EQ(row.at("lr"), 0.1);
  EXPECT_FALSE(row.contains("nothing"));
}

TEST(Run, ReportsRateMemoryAndUtilisation) {
  const Folder folder;
  ::setenv("TESSERA_PEAK_FLOPS", "1e12", 1);
  with_ranks(2, [&](const Communicator& world) {
    trained(world, {.epochs = 1, .report_every = 1}, {}, {.log_with = {(folder / "log.jsonl").string()}});
  });
  ::setenv("TESSERA_PEAK_FLOPS", "fast", 1);
  with_ranks(1, [](const Communicator& world) {
    EXPECT_THAT(message_of<ConfigError>([&] { train::Utilisation(world, at::kFloat); }), HasSubstr("TESSERA_PEAK_FLOPS 'fast'"));
  });
  ::unsetenv("TESSERA_PEAK_FLOPS");
  auto net = seeded_net();
  const simulate::FlopCounter counter;
  squared_output(net, 1).backward();
  std::ifstream file(folder / "log.jsonl");
  nlohmann::json first, last;
  for (std::string line; std::getline(file, line); first = first.is_null() ? last : first) last = nlohmann::json::parse(line);
  EXPECT_FALSE(first.contains("mfu"));  // as long as nothing is counted
  EXPECT_GT(first.at("memory"), 1e6);
  // Two samples are a batch of both ranks, and the time cancels out.
  const double flops = last.at("mfu").get<double>() / (last.at("samples_per_second").get<double>() / 2) * 2e12;
  EXPECT_GT(counter.flops(), 0);
  EXPECT_NEAR(flops, 2 * counter.flops(), 1e-3);
}

TEST(Run, ReportsTheLastStepOfAnEpochWithoutAReport) {
  const Folder folder;
  const auto steps_reported = [&](RunOptions options) {
    const auto log = folder / fmt::format("{}-{}.jsonl", options.report_every, options.steps.value_or(0));
    with_ranks(1, [&](const Communicator& world) { trained(world, options, {}, {.log_with = {log.string()}}); });
    std::vector<int64_t> steps;
    std::ifstream file(log);
    for (std::string line; std::getline(file, line);) steps.push_back(nlohmann::json::parse(line).at("step"));
    return steps;
  };
  EXPECT_THAT(steps_reported({.epochs = 3}), ElementsAre(6, 12, 18));
  EXPECT_THAT(steps_reported({.epochs = 3, .report_every = 8}), ElementsAre(6, 8, 16));
  EXPECT_THAT(steps_reported({.steps = 8}), ElementsAre(6, 8));
}

/// For each batch of one rank, a loss and the number of tokens over which it is the mean.
struct Passes {
  std::vector<double> losses, tokens;
};

/// Trains an epoch of eight batches, the last two of which are a step, and compares what the log has of those steps, given as their
/// batches.
void expect_means_of_steps(int64_t report_every, const std::vector<std::pair<size_t, size_t>>& steps) {
  const Folder folder;
  std::vector<Passes> ranks(2);
  with_ranks(2, [&](const Communicator& world) {
    auto& own = ranks[static_cast<size_t>(world.rank())];
    auto options = options_for(world, {{"gradient_accumulation_steps", "3"}});
    options.log_with = {(folder / "log.jsonl").string()};
    Trainer trainer(options);
    auto net = seeded_net();
    auto loader = numbers_loader(world, 16);
    trainer.prepare(net, loader);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    train::Run run(trainer, loader, {.epochs = 1, .report_every = report_every});
    while (run.next_epoch()) {
      for (const auto& batch : run.batches()) {
        const auto accumulation = trainer.accumulate();
        const auto number = batch.inputs[0].item<int64_t>();
        const auto loss = squared_output(net, number);
        trainer.backward(loss);
        const auto norm = trainer.grad_norm();
        trainer.step();
        own.losses.push_back(loss.item<double>());
        own.tokens.push_back(static_cast<double>(number % 4));
        const auto tokens = at::tensor(own.tokens.back());
        const auto of_tokens = number % 4 == 0 ? at::full({}, std::nan("")) : loss;
        run.report({{"loss", loss}, {"loss_of_tokens", of_tokens, tokens}, {"loss_of_nothing", of_tokens, tokens * 0}, {"norm", norm}});
      }
    }
    EXPECT_THAT(message_of<UsageError>([&] {
                  run.report({{"x", at::tensor(1.0)}, {"x", at::tensor(1.0)}});
                }),
                HasSubstr("was given 'x' twice"));
  });
  std::ifstream file(folder / "log.jsonl");
  std::string line;
  for (const auto& [begin, end] : steps) {
    ASSERT_TRUE(std::getline(file, line));
    const auto row = nlohmann::json::parse(line);
    double losses = 0, of_tokens = 0, tokens = 0;
    for (const auto& rank : ranks) {
      for (auto i = begin; i < end; i++) {
        losses += rank.losses[i] / static_cast<double>(2 * (end - begin));
        of_tokens += rank.losses[i] * rank.tokens[i];
        tokens += rank.tokens[i];
      }
    }
    EXPECT_NEAR(row.at("loss").get<double>(), losses, 1e-6);
    EXPECT_NEAR(row.at("loss_of_tokens").get<double>(), of_tokens / tokens, 1e-6);
    EXPECT_TRUE(row.contains("norm"));
  }
  EXPECT_FALSE(std::getline(file, line));
}

TEST(Run, ReportsMeansOverTheBatchesOfAStep) {
  expect_means_of_steps(1, {{0, 3}, {3, 6}, {6, 8}});
  expect_means_of_steps(20, {{6, 8}});
}

/// Returns the samples on which the run has trained. Row i is sample i.
std::vector<int64_t> learnt(const Communicator& world, const RunOptions& options) {
  Trainer trainer({.world = world});
  auto net = seeded_net();
  data::Loader loader(
      trainer.make_sampler({.size = 31, .global_batch = int64_t{2} * world.size(), .tail = data::Tail::Keep, .seed = 4}),
      [](std::span<const int64_t> numbers) { return data::Samples{.inputs = at::tensor(numbers, at::kLong), .targets = {}}; });
  trainer.prepare(net, loader);
  optim::SGD optimizer(parameters(*net), {.lr = 0.01});
  trainer.prepare(optimizer);
  Run run(trainer, loader, options);
  std::vector<int64_t> all;
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      trainer.backward(squared_output(net, batch.inputs[0].item<int64_t>()));
      trainer.step();
      const auto numbers = trainer.gather_for_metrics(batch.inputs, batch);
      all.insert(all.end(), numbers.const_data_ptr<int64_t>(), numbers.const_data_ptr<int64_t>() + numbers.numel());
    }
  }
  return all;
}

TEST(Run, GoesOnWithinAnEpochOnAnyNumberOfRanks) {
  const Folder folder;
  for (const int then : {1, 3, 4}) {
    const auto prefix = folder / std::to_string(then);
    std::vector<int64_t> seen;
    const auto go_on = [&](int ranks, const RunOptions& options) {
      with_ranks(ranks, [&](const Communicator& world) {
        const auto own = learnt(world, options);
        if (world.is_first()) seen.insert(seen.end(), own.begin(), own.end());
      });
    };
    go_on(2, {.steps = 5, .prefix = prefix});  // stops after 20 samples
    go_on(then, {.epochs = 1, .prefix = prefix, .resume = true});
    std::ranges::sort(seen);
    std::vector<int64_t> every(31);
    std::iota(every.begin(), every.end(), 0);
    EXPECT_EQ(seen, every) << then;
  }
}

TEST(Run, RefusesWhatCanNotBeMeant) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    EXPECT_THAT(refusal(world, {}), HasSubstr("neither epochs nor steps"));
    EXPECT_THAT(refusal(world, {.epochs = -1}), HasSubstr("-1 epochs"));
    EXPECT_THAT(refusal(world, {.epochs = 1, .report_every = 0}), HasSubstr("a report every 0 steps"));
    EXPECT_THAT(refusal(world, {.epochs = 1, .resume = true}), HasSubstr("no prefix"));
    trained(world, {.epochs = 1, .prefix = folder / "net"});
    EXPECT_THAT(refusal(world, {.epochs = 1, .prefix = folder / "net"}), HasSubstr("net-step-000006 already; resume from it"));
    EXPECT_THAT(refusal(world, {.epochs = 2, .prefix = folder / "net", .resume = true}, /*seed=*/1),
                AllOf(HasSubstr("with seed 0"), HasSubstr("with seed 1"), HasSubstr("another order")));
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 4), other = numbers_loader(world, 4);
    trainer.prepare(net, loader);
    EXPECT_THROW(train::Run(trainer, loader, {.epochs = 1}), UsageError);  // without an optimizer
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    EXPECT_THROW(train::Run(trainer, other, {.epochs = 1}), UsageError);
    train::Run run(trainer, loader, {.epochs = 1, .report_every = 1});
    EXPECT_THROW(run.batches().begin(), UsageError);
    EXPECT_TRUE(run.next_epoch());
    const auto batches = run.batches().begin();
    EXPECT_THROW(run.report({}), UsageError);  // before the step
  });
}

/// 11 rows in batches of 4: the last one has 3, so that ranks have different numbers of them.
std::vector<at::Tensor> trained_on_a_stream(const Communicator& world, const RunOptions& options) {
  Trainer trainer({.world = world});
  auto net = seeded_net();
  const auto open = [](int64_t epoch) {
    return [epoch, next = int64_t{0}]() mutable -> std::optional<data::Samples> {
      if (next == 11) return std::nullopt;
      return data::Samples{.inputs = input(100 * epoch + next++).narrow(0, 0, 1), .targets = {}};
    };
  };
  data::Loader loader(trainer.make_stream({.open = open, .global_batch = 4, .tail = data::Tail::Keep}));
  trainer.prepare(net, loader);
  optim::SGD optimizer(parameters(*net), {.lr = 0.1});
  trainer.prepare(optimizer);
  Run run(trainer, loader, options);
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      const auto loss = net->forward(batch.inputs).pow(2).mean();
      trainer.backward(loss);
      trainer.step();
      run.report({{"loss", loss}});
    }
  }
  EXPECT_THAT(message_of<UsageError>([&] { trainer.steps_of_epoch(loader); }), HasSubstr("is not known before they end"));
  return whole_values(*net);
}

TEST(Run, GoesOnInAStreamWithAnyNumberOfRanks) {
  const Folder folder;
  std::vector<at::Tensor> expected;
  with_ranks(1, [&](const Communicator& world) { expected = trained_on_a_stream(world, {.epochs = 3}); });
  std::filesystem::path prefix;
  for (const int64_t stop : {3, 4, 5, 8}) {  // at the end of an epoch, within one, with its last batch
    for (const int ranks : {2, 4}) {
      prefix = folder / fmt::format("{}-{}", stop, ranks);
      with_ranks(ranks, [&](const Communicator& world) { trained_on_a_stream(world, {.steps = stop, .prefix = prefix}); });
      with_ranks(ranks / 2, [&](const Communicator& world) {
        const auto actual = trained_on_a_stream(world, {.epochs = 3, .prefix = prefix, .resume = true});
        for (size_t i = 0; i < expected.size(); i++)
          EXPECT_TRUE(at::allclose(actual[i], expected[i], 1e-5, 1e-6)) << i << " after step " << stop;
      });
    }
  }
}

}  // namespace
}  // namespace tessera::train::run_test
