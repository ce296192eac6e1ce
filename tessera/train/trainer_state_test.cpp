// The Trainer saves states and resumes from them: in all layouts, replaced, damaged, and on another number of ranks.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/writer.h"
#include "tessera/optim/adam.h"
#include "tessera/optim/average.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/parameters.h"
#include "tessera/train/trainer.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/trained.h"

namespace tessera::testing::trainer_state_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

std::vector<at::Tensor> train(const Communicator& world, const std::string& layout, const std::filesystem::path& folder, int saves_after,
                              int loads_before) {
  Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
  auto net = seeded_net();
  auto loader = numbers_loader(world, 12);
  trainer.prepare(net, loader);
  optim::AdamW optimizer(parameters(*net), {.lr = 0.1, .beta1 = 0.8});
  trainer.prepare(optimizer, optim::LearningRate{.base = 0.1, .warmup = 8});
  Phase phase;
  trainer.register_for_checkpointing(phase);
  if (loads_before > 0) {
    trainer.load_state(folder);
    EXPECT_EQ(trainer.steps(), loads_before);
    EXPECT_EQ(loader.position().batch, loads_before);
    EXPECT_EQ(phase.number, 17);
  }
  phase.number = 17;
  for (const auto& batch : loader) {
    trainer.backward(squared_output(net, batch.inputs[0].item<int64_t>()));
    trainer.step();
    if (trainer.steps() == saves_after) trainer.save_state(folder);
  }
  return whole_values(*net);
}

TEST(TrainerState, GoesOnFromWhatItHasSaved) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"}) {
    with_ranks(2, [&](const Communicator& world) {
      const auto place = folder / layout;
      const auto expected = train(world, layout, place, 3, 0);
      expect_same(train(world, layout, place, 0, 3), expected);
    });
  }
  EXPECT_THAT(names_in(folder / "SHARDED_STATE_DICT").value(),
              UnorderedElementsAre("pytorch_model_fsdp_0", "optimizer_0", "random_states_0.pkl", "random_states_1.pkl", "scheduler.bin",
                                   "dl_state_dict.bin", "custom_checkpoint_0.pkl"));
}

TEST(TrainerState, IsOfTesseraUnlessAccelerateIsAskedFor) {
  using Pairs = std::map<std::string, std::string>;
  const std::pair<Pairs, const char*> cases[] = {
      {{}, "manifest.json"},
      {{{"distributed_type", "MULTI_CPU"}}, "manifest.json"},
      {{{"fsdp_state_dict_type", "LOCAL_STATE_DICT"}}, "manifest.json"},
      {{{"fsdp_state_dict_type", "FULL_STATE_DICT"}}, "pytorch_model_fsdp.bin"},
      {{{"tessera_checkpoint_format", "accelerate"}}, "pytorch_model_fsdp_0"},
      {{{"tessera_checkpoint_format", "accelerate"}, {"distributed_type", "MULTI_CPU"}}, "model.safetensors"},
  };
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    for (const auto& [settings, file] : cases) {
      Trainer trainer(options_for(world, settings));
      auto net = seeded_net();
      trainer.prepare(net);
      trainer.save_state(folder / "run");
      EXPECT_TRUE(std::filesystem::exists(folder / "run" / file)) << file;
      trainer.load_state(folder / "run");
      world.barrier({.unit = "loaded"});
    }
  });
}

TEST(TrainerState, GoesOnWithTheProgramsOwnNumbersInReports) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "LOCAL_STATE_DICT"}) {
    const auto place = folder / layout, report = folder / (std::string(layout) + ".jsonl");
    const auto run = [&](const Communicator& world, int first, int last, int number, int saved) {
      auto options = options_for(world, {{"fsdp_state_dict_type", layout}});
      options.log_with = {report.string()};
      Trainer trainer(std::move(options));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      if (first > 1) trainer.load_state(place);
      for (int epoch = first; epoch <= last; epoch++) {
        for (int step = 0; step < 3; step++) {
          trainer.backward(squared_output(net, step));
          trainer.step();
        }
        if (epoch == saved) trainer.save_state(place);
        trainer.log({{"epoch", static_cast<double>(epoch)}}, epoch * number);
      }
      trainer.end_training();
    };
    for (const int number : {1, 100}) {                                                // fewer than steps, and more
      with_ranks(2, [&](const Communicator& world) { run(world, 1, 3, number, 2); });  // ends after epoch 3, which is done again
      with_ranks(2, [&](const Communicator& world) { run(world, 3, 4, number, 0); });
      std::ifstream lines(report);
      int epochs = 0;
      for (std::string line; std::getline(lines, line);) epochs++;
      EXPECT_EQ(epochs, 4) << layout << number;
    }
  }
}

/// The usual pattern: the loss of steps, and a number of each epoch.
TEST(TrainerState, GoesOnWithStepsAndEpochsInOneReport) {
  const Folder folder;
  const auto run = [&](const Communicator& world, int first, int last, int saved) {
    auto options = options_for(world);
    options.log_with = {folder / "log.jsonl", folder / "board/"};
    Trainer trainer(std::move(options));
    auto net = seeded_net();
    trainer.prepare(net);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    if (first > 1) trainer.load_state(folder / "run");
    for (int epoch = first; epoch <= last; epoch++) {
      for (int step = 0; step < 3; step++) {
        trainer.backward(squared_output(net, step));
        trainer.step();
        if (first == 1 || epoch > first) trainer.log({{"loss", static_cast<double>(epoch)}});
      }
      if (epoch == saved) trainer.save_state(folder / "run");
      trainer.log({{"accuracy", static_cast<double>(epoch)}}, epoch);
    }
    trainer.end_training();
  };
  with_ranks(2, [&](const Communicator& world) { run(world, 1, 3, 2); });
  with_ranks(2, [&](const Communicator& world) { run(world, 3, 4, 0); });  // reports the accuracy first
  std::string lines;
  for (int epoch = 1; epoch <= 4; epoch++) {
    for (int step = 1; step <= 3; step++) {
      if (epoch == 3) continue;
      lines += fmt::format("{{\"step\":{},\"loss\":{}}}\n", 3 * (epoch - 1) + step, epoch);
    }
    lines += fmt::format("{{\"step\":{0},\"accuracy\":{0}}}\n", epoch);
  }
  EXPECT_EQ(read_file(folder / "log.jsonl"), lines);
}

TEST(TrainerState, CountsStepsWithoutTheFilesOfSomeRanks) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "FULL_STATE_DICT"}) {
    for (const bool by_accelerate : {false, true}) {
      with_ranks(2, [&](const Communicator& world) {
        const auto place = folder / layout;
        const auto run = [&](const auto& act) {
          Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
          auto net = seeded_net();
          trainer.prepare(net);
          optim::AdamW optimizer(parameters(*net), {.lr = 0.1});
          trainer.prepare(optimizer, optim::LearningRate{.base = 0.1, .warmup = 8});
          act(trainer, net, optimizer);
        };
        double rate = 0;
        run([&](Trainer& trainer, Net& net, optim::AdamW& optimizer) {
          for (int step = 0; step < 4; step++) {
            trainer.backward(squared_output(net, step));
            trainer.step();
          }
          trainer.save_state(place);
          rate = optimizer.lr();
        });
        world.barrier({.unit = "saved"});
        if (world.is_first()) {
          std::filesystem::remove(place / "random_states_1.pkl");
          if (by_accelerate) {  // the file of Accelerate has only the count
            checkpoint::TorchFileWriter writer(place / "scheduler.bin", checkpoint::pickle::Dict{{{"last_epoch", int64_t{8}}}});
            writer.close();
          }
        }
        world.barrier({.unit = "removed"});
        run([&](Trainer& trainer, Net&, optim::AdamW& optimizer) {
          trainer.load_state(place);
          EXPECT_EQ(trainer.steps(), 4) << layout << by_accelerate;
          EXPECT_EQ(optimizer.lr(), rate);
        });
      });
    }
  }
}

TEST(TrainerState, IsNotThereInAnEmptyFolder) {
  const Folder folder;
  std::filesystem::create_directory(folder / "empty");
  write_file(folder / "file", "");
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_FALSE(trainer.has_state(folder / "empty"));
    EXPECT_THAT(message_of<UsageError>([&] { (void)trainer.has_state(folder / "file"); }), HasSubstr("file is a file"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "file"); }), HasSubstr("file is a file"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(folder / "empty"); }), HasSubstr("empty is empty"));
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder / "file"); }), HasSubstr("file is a file"));
  });
}

TEST(TrainerState, IsSavedThroughALink) {
  const Folder folder;
  std::filesystem::create_directory(folder / "elsewhere");
  for (const auto* layout : {"SHARDED_STATE_DICT", "LOCAL_STATE_DICT"}) {
    const auto link = folder / (std::string("link_of_") + layout);
    std::filesystem::create_directory_symlink(std::filesystem::path("elsewhere") / layout, link);  // to what is not there yet
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
      auto net = seeded_net();
      trainer.prepare(net);
      for (const auto& place : {link, link / ""}) {
        trainer.save_state(place);
        EXPECT_TRUE(trainer.has_state(place));
        trainer.load_state(place);
      }
      trainer.save_model(net, link / "weights");
    });
    EXPECT_TRUE(std::filesystem::is_symlink(link));
    EXPECT_FALSE(names_in(folder / "elsewhere" / layout)->empty());
  }
  EXPECT_THAT(names_in(folder / "elsewhere").value(), UnorderedElementsAre("SHARDED_STATE_DICT", "LOCAL_STATE_DICT"));
}

// Errors name the folder that the program has given.
TEST(TrainerState, SaysWhereTheDiskIsFull) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "LOCAL_STATE_DICT"}) {
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
      auto net = seeded_net();
      trainer.prepare(net);
      world.barrier({.unit = "prepared"});
      std::optional<FullDisk> full;
      if (world.is_first()) full.emplace(600);
      world.barrier({.unit = "full"});
      const auto message = message_of<IoError>([&] { trainer.save_state(folder / layout); });
      EXPECT_THAT(message, HasSubstr(folder / layout));
      world.barrier({.unit = "seen"});
    });
  }
}

TEST(TrainerState, KeepsSeveralModelsApart) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto run = [&](auto act) {
      Trainer trainer(options_for(world));
      auto one = seeded_net(), other = seeded_net();
      trainer.prepare(one);
      optim::SGD for_one(parameters(*one), {.lr = 0.1});
      trainer.prepare(for_one, other);
      torch::optim::AdamW for_other(parameters(*other), torch::optim::AdamWOptions(0.1));
      trainer.prepare(for_other);
      act(trainer, one, other, for_one, for_other);
      auto values = whole_values(*one);
      for (const auto& value : whole_values(*other)) values.push_back(value);
      return values;
    };
    const auto saved = run([&](Trainer& trainer, Net& one, Net& other, auto& for_one, auto& for_other) {
      trainer.backward(squared_output(one, 1));
      trainer.step(for_one);
      trainer.backward(squared_output(other, 2));
      trainer.step(for_other);
      trainer.save_state(folder / "run");
    });
    expect_same(run([&](Trainer& trainer, Net&, Net&, auto&, auto&) { trainer.load_state(folder / "run"); }), saved);
  });
}

TEST(TrainerState, HasTheAverageOfAModel) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const auto average_of = [&](bool resumes) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::Average average(net.ptr(), {.decay = 0.5});
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(average, optimizer);
      EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(average); }), HasSubstr("two averages of one model"));
      if (resumes) trainer.load_state(folder / "run");
      for (auto step = trainer.steps(); step < 4; step++) {
        trainer.backward(squared_output(net, step));
        trainer.step();
        average.update();
        if (!resumes && step == 1) trainer.save_state(folder / "run");
      }
      const auto swapped = average.swapped();
      return whole_values(*net);
    };
    const auto expected = average_of(/*resumes=*/false);
    expect_same(average_of(/*resumes=*/true), expected);
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    optim::Average average(net.ptr());
    EXPECT_THAT(message_of<UsageError>([&] { trainer.prepare(average); }), HasSubstr("an average comes after its model"));
  });
}

TEST(TrainerState, ReplacesWhatItHasSaved) {
  const Folder folder;
  for (const auto* layout : {"SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"}) {
    with_ranks(2, [&](const Communicator& world) {
      Trainer trainer(options_for(world, {{"fsdp_state_dict_type", layout}}));
      auto net = seeded_net();
      trainer.prepare(net);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      for (int step = 0; step < 3; step++) {
        trainer.backward(squared_output(net, step));
        trainer.step();
        trainer.save_state(folder / layout);
      }
      const auto last = whole_values(*net);
      trainer.backward(squared_output(net, 7));
      trainer.step();
      // As a process that was killed between two renames leaves it.
      world.barrier();
      if (world.is_first()) std::filesystem::rename(folder / layout, folder / (std::string(layout) + ".old"));
      trainer.load_state(folder / layout);
      EXPECT_EQ(trainer.steps(), 3);
      expect_same(whole_values(*net), last);
    });
    EXPECT_EQ(names_in(folder / layout)->empty(), false);
  }
  EXPECT_THAT(names_in(folder / "").value(), UnorderedElementsAre("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"));
  std::filesystem::create_directory(folder / "mine");
  write_file(folder / "mine/notes.txt", "a diary");
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder / "mine"); }), HasSubstr("was not saved by save_state"));
  });
  EXPECT_EQ(read_file(folder / "mine/notes.txt"), "a diary");
}

TEST(TrainerState, DoesNotReplaceWhatOnlyLooksLikeModels) {
  const Folder folder;
  write_file(folder / "model_best.pth", "weights");
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_THAT(message_of<UsageError>([&] { trainer.save_state(folder.path()); }), HasSubstr("was not saved by save_state"));
  });
  EXPECT_EQ(read_file(folder / "model_best.pth"), "weights");
}

TEST(TrainerState, FindsAStateThatWasHalfReplaced) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world));
    auto net = seeded_net();
    trainer.prepare(net);
    EXPECT_FALSE(trainer.has_state(folder / "run"));
    trainer.save_state(folder / "run");
    world.barrier({.unit = "saved"});
    if (world.is_first()) std::filesystem::rename(folder / "run", folder / "run.old");
    EXPECT_TRUE(trainer.has_state(folder / "run"));
  });
}

TEST(TrainerState, GoesOnInTheMiddleOfAnEpochWithBatchesOfAnotherSize) {
  const Folder folder;
  const auto run = [&](int ranks, const auto& act) {
    with_ranks(ranks, [&](const Communicator& world) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      auto loader = numbers_loader(world, 24);
      trainer.prepare(net, loader);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      act(trainer, loader);
    });
  };
  run(4, [&](Trainer& trainer, data::Loader& loader) {
    for (int batch = 0; batch < 3; batch++) loader.next();
    trainer.save_state(folder / "run");
  });
  run(2, [&](Trainer& trainer, data::Loader& loader) {
    trainer.load_state(folder / "run");
    EXPECT_EQ(loader.position().batch, 6);
  });
  run(5, [&](Trainer& trainer, data::Loader& loader) {
    trainer.load_state(folder / "run");
    EXPECT_EQ(loader.position(), (data::Position{.first = 12}));
    EXPECT_EQ(trainer.steps_of_epoch(loader), 4);
    loader.next();
    trainer.save_state(folder / "run");
  });
  run(3, [&](Trainer& trainer, data::Loader& loader) {
    trainer.load_state(folder / "run");
    EXPECT_EQ(loader.position(), (data::Position{.first = 17}));
    EXPECT_EQ(loader.batches(), 2);
    while (loader.next()) {
    }
    EXPECT_EQ(loader.position(), (data::Position{.epoch = 1}));
  });
}

TEST(TrainerState, DoesNotGoOnWithOtherData) {
  const Folder folder;
  const auto images = data::fake_images({.count = 8, .height = 2, .width = 2}),
             others = data::fake_images({.count = 8, .height = 2, .width = 2, .seed = 1});
  with_ranks(2, [&](const Communicator& world) {
    const auto run = [&](const char* format, const std::string& data, const auto& act) {
      Trainer trainer(options_for(world, {{"tessera_checkpoint_format", format}}));
      auto net = seeded_net();
      data::Loader loader(trainer.make_sampler({.size = 8, .global_batch = 2}),
                          [&](std::span<const int64_t> numbers) { return data::pick(images, numbers); }, {.data = data});
      trainer.prepare(net, loader);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      act(trainer);
    };
    for (const auto* format : {"tessera", "accelerate"}) {
      const auto place = folder / format;
      run(format, data::fingerprint(images), [&](Trainer& trainer) { trainer.save_state(place); });
      run(format, data::fingerprint(others), [&](Trainer& trainer) {
        EXPECT_THAT(message_of<UsageError>([&] { trainer.load_state(place); }),
                    HasSubstr("the run was saved with other data: a loader of samples"));
      });
      run(format, data::fingerprint(images), [&](Trainer& trainer) { trainer.load_state(place); });
      run(format, "", [&](Trainer& trainer) { trainer.load_state(place); });
    }
  });
}

// An epoch that is over stays over, in whatever way its last batch was filled, and a schedule over the data continues where it was.
TEST(TrainerState, GoesOnAfterAnEpochWithBatchesOfAnotherSize) {
  const Folder folder;
  const auto run = [&](int ranks, const auto& act) {
    with_ranks(ranks, [&](const Communicator& world) {
      Trainer trainer(options_for(world));
      auto net = seeded_net();
      data::Loader loader(data::Sampler({.size = 10,
                                         .global_batch = world.size(),
                                         .local_ranks = world.local_ranks(),
                                         .ranks = world.size(),
                                         .tail = data::Tail::Fill}),
                          [](std::span<const int64_t>) { return data::Samples{.inputs = at::zeros({1}), .targets = {}}; }, {.workers = 0});
      trainer.prepare(net, loader);
      optim::SGD optimizer(parameters(*net), {.lr = 0.1});
      trainer.prepare(optimizer);
      act(trainer, loader, net);
    });
  };
  run(4, [&](Trainer& trainer, data::Loader& loader, Net& net) {
    while (loader.position().batch < loader.batches()) {
      loader.next();
      trainer.backward(squared_output(net, 1));
      trainer.step();
    }
    EXPECT_EQ(trainer.steps(), 3);
    trainer.save_state(folder / "run");
  });
  for (const int ranks : {2, 5}) {
    run(ranks, [&](Trainer& trainer, data::Loader& loader, Net&) {
      trainer.load_state(folder / "run");
      EXPECT_EQ(loader.position(), (data::Position{.epoch = 0, .batch = *loader.batches()}));
      EXPECT_EQ(trainer.steps(), ranks == 2 ? 6 : 2);
    });
  }
}

TEST(TrainerState, DoesNotTakeADamagedFileForAMissingOne) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer(options_for(world, {{"tessera_checkpoint_format", "accelerate"}}));
    auto net = seeded_net();
    auto loader = numbers_loader(world, 8);
    trainer.prepare(net, loader);
    optim::SGD optimizer(parameters(*net), {.lr = 0.1});
    trainer.prepare(optimizer);
    Phase phase;
    trainer.register_for_checkpointing(phase);
    trainer.save_state(folder / "run");
    for (const auto* name : {"scheduler.bin", "dl_state_dict.bin", "custom_checkpoint_0.pkl"}) {
      const auto file = folder / "run" / name;
      if (world.is_first()) {
        std::filesystem::copy_file(file, folder / name);
        std::filesystem::resize_file(file, std::filesystem::file_size(file) / 2);
      }
      world.barrier({.unit = "damage"});
      EXPECT_THAT(message_of<IoError>([&] { trainer.load_state(folder / "run"); }), HasSubstr(std::string(name) + " is damaged"));
      world.barrier({.unit = "mended"});
      if (world.is_first()) std::filesystem::rename(folder / name, file);
      world.barrier({.unit = "mended"});
      trainer.load_state(folder / "run");
    }
  });
}

}  // namespace
}  // namespace tessera::testing::trainer_state_test
