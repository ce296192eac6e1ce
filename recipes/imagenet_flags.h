// The command line of the recipe for images, and the options of the library that follow from it: the flags of PyTorch/XLA's ImageNet
// example, and more for ViTs and for pictures of one's own.
#pragma once

#include <tessera/base/folder.h>
#include <tessera/base/words.h>
#include <tessera/models/image_model.h>
#include <tessera/tessera.h>
#include <tessera/vision.h>
#include <torch/torch.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <vector>

#include "recipe_flags.h"

struct Flags : ExampleFlags {
  Flags() {
    run = {.epochs = 18, .save_epochs = false};  // saved when buffers are the same on all ranks
    batch_size = 128;
    workers = 4;
  }

  std::filesystem::path datadir, weights, output, logdir;
  std::string model = "resnet50", optimizer = "sgd", schedule = "WarmupAndExponentialDecayScheduler", wrap = "none";
  int64_t test_batch_size = 64, image = 0, eval_interval = 1, divide_every = 20;
  double divisor = 5, warmup = 0.9, momentum = 0.9, weight_decay = 1e-4, smoothing = 0, average = 0, mixup = 0, cutmix = 0, wrap_size = 1e6;
  std::optional<double> lr;
  bool small_sample = false, test_at_end = false, new_head = false, skip_damaged = false, augment = false, profile = false;
  bool rows = false, fp32_reduce = false, channels_last = false;
};

/// `tessera launch` may set keys that the flags do not set.
inline tessera::TrainerOptions options_of(const Flags& flags) {
  auto options = options_of(flags, flags.nested || flags.wrap == "type_based", tessera::models::image_network(flags.model).blocks);
  auto& settings = options.settings;
  if (flags.rows) settings["tessera_layout"] = "rows";
  if (flags.gradient_checkpointing) settings["fsdp_activation_checkpointing"] = "true";
  if (flags.wrap == "size_based") {
    settings["fsdp_auto_wrap_policy"] = "SIZE_BASED_WRAP";
    settings["fsdp_min_num_params"] = std::to_string(std::llround(flags.wrap_size));
  }
  options.adjust_sharding = [&flags](tessera::ShardOptions& sharding) {
    sharding.start = tessera::Start::Equal;  // values are drawn when they are sharded, the same on all ranks
    if (!flags.fp32_reduce) return;
    if (!sharding.mixed_precision.param_dtype)
      throw tessera::ConfigError("--fp32-reduce-scatter: gradients are in float32 as it is; it is for a lower --compute-dtype");
    sharding.mixed_precision.reduce_dtype = torch::kFloat;
  };
  return options;
}

/// Files have the names of torchvision, timm or this recipe. Old ones do not count batches.
inline tessera::checkpoint::WeightsOptions weights_of(const Flags& flags) {
  tessera::checkpoint::WeightsOptions options{.may_be_missing = {".*\\.num_batches_tracked"},
                                              .may_be_unknown = {"AuxLogits\\..*"},
                                              .renamed = tessera::models::renames_of(flags.model)};
  if (flags.new_head) {
    const auto& head = tessera::models::image_network(flags.model).head;
    options.may_be_missing.push_back(head + "\\..*");
    options.may_be_unknown.push_back("unused\\..*");
    options.renamed.emplace_back("^" + head + "\\.", "unused.");
  }
  return options;
}

/// The scale of pixels that those weights expect.
inline tessera::vision::Normalize normalize_of(const Flags& flags) {
  const auto scale = tessera::models::pixel_scale_of(flags.model);
  return {.mean = scale.mean, .deviation = scale.deviation};
}

/// Calls `load`, and adds advice to its error if the last layer has another size.
template <class Load>
auto with_advice(const Flags& flags, const Load& load) {
  try {
    return load();
  } catch (const tessera::UsageError& error) {
    const auto head = "'" + tessera::models::image_network(flags.model).head + ".weight'";
    if (std::string_view(error.what()).find(head) == std::string_view::npos) throw;
    throw tessera::UsageError("{}; if it was saved for other classes, begin a run with --weights FILE --new-head", error.what());
  }
}

/// Reads the tar shards in a folder, or the pictures in its folders.
inline tessera::vision::ImageSet set_in(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> shards;
  for (const auto& name : tessera::names_in(folder).value_or(std::vector<std::string>())) {
    if (name.ends_with(".tar")) shards.push_back(folder / name);
  }
  return shards.empty() ? tessera::vision::read_image_folder(folder) : tessera::vision::read_tar_shards(shards);
}

/// Says how many pictures were left out, if any.
inline void tell_of_damaged(const std::vector<std::shared_ptr<tessera::vision::Damaged>>& sets, const tessera::Trainer& trainer,
                            tessera::train::Run& run) {
  int64_t count = 0;
  for (const auto& damaged : sets) count += damaged ? std::ssize(damaged->names_on(trainer.world())) : 0;
  if (count > 0) run.say(fmt::format("{} could not be decoded and counted for nothing", tessera::counted(count, "picture")));
}

/// The mean over pictures that are not damaged. Targets are labels, or shares of classes.
inline at::Tensor loss_of(const Flags& flags, const at::Tensor& scores, const at::Tensor& targets) {
  const auto sum = at::cross_entropy_loss(scores, targets, {}, at::Reduction::Sum, tessera::vision::kDamagedTarget, flags.smoothing);
  return sum / (targets.dim() == 1 ? targets.ge(0) : targets.sum(1).gt(0)).sum().clamp_min(1);
}

inline std::unique_ptr<tessera::optim::Optimizer> make_optimizer(const Flags& flags, const std::vector<at::Tensor>& parameters) {
  using namespace tessera::optim;
  if (flags.optimizer == "adamw")
    return std::make_unique<AdamW>(parameters, AdamWOptions{.lr = *flags.lr, .weight_decay = flags.weight_decay});
  return std::make_unique<SGD>(parameters, SgdOptions{.lr = *flags.lr, .momentum = flags.momentum, .weight_decay = flags.weight_decay});
}

/// The learning rate of a run whose epochs have `epoch` steps.
inline tessera::optim::LearningRate rate_of(const Flags& flags, int64_t epoch) {
  using Shape = tessera::optim::LearningRate::Shape;
  tessera::optim::LearningRate rate{.base = *flags.lr};
  if (flags.schedule == "none") return rate;
  rate.warmup = std::llround(flags.warmup * static_cast<double>(epoch));
  if (flags.schedule == "cosine") {
    const auto all = *flags.run.epochs * epoch;
    rate.shape = Shape::Cosine;
    rate.steps = std::max<int64_t>(std::min(all, flags.run.steps.value_or(all)), 1);
    rate.warmup = std::min(rate.warmup, rate.steps - 1);
  } else {
    rate.shape = Shape::StepsOfRun;
    rate.factor = 1 / flags.divisor;
    rate.every = std::max<int64_t>(flags.divide_every * epoch, 1);
  }
  return rate;
}

/// Says why flags of PyTorch/XLA's example are not here.
inline std::string why_not(const CLI::App& app, const std::string& word) {
  constexpr auto kUnused = "PyTorch/XLA's example takes it, but does nothing with it; leave it out";
  constexpr auto kAhead = "workers are four batches ahead, and bring them to the devices; --num-workers says how many threads they are";
  for (const auto& [name, reason] : {
           std::pair("--pin-layout-in-collective-ops",
                     "layouts are pinned where each device compiles a program of its own, and here all run one; leave it out"),
           {"--no-pin-layout-in-collective-ops", "that is always so, because all devices run one program; leave it out"},
           {"--profiler-port", "nothing listens at a port; --profile writes a trace to a file"},
           {"--pjrt-distributed", "ranks meet by themselves, such as under tessera launch -n 2; leave it out"},
           {"--async-closures", kUnused},
           {"--tidy", kUnused},
           {"--debug", kUnused},
           {"--prefetch-factor", kAhead},
           {"--pin-memory", kAhead},
           {"--persistent-workers", kAhead},
           {"--loader-prefetch-size", kAhead},
           {"--device-prefetch-size", kAhead},
           {"--cpu-to-device-transfer-threads", kAhead},
       }) {
    if (word == name) return reason;
  }
  return tessera::cli::why_of_launch(app, word);
}

inline void declare_data(CLI::App& app, Flags& flags) {
  using tessera::cli::from_to;
  app.add_option("--datadir", flags.datadir,
                 "Folder with train/ and val/, and in these a folder of pictures for each class, or tar shards with NAME.jpg and NAME.cls")
      ->type_name("FOLDER");
  app.add_flag("--fake-data", flags.fake_data, "Generated images instead of files: 1200000, and 50000 to test with");
  app.add_flag("--use-small-fake-sample", flags.small_sample, "Only 1000 and 200 of them")->needs("--fake-data");
  app.add_option("--image-size", flags.image, "Height and width; what the model's weights were trained for unless given")
      ->check(from_to(1, 10'000));
  app.add_option("--test-set-batch-size", flags.test_batch_size, "Samples per rank and step of a test")
      ->capture_default_str()
      ->check(from_to(1, 1'000'000));
  app.add_flag("--skip-damaged", flags.skip_damaged, "Pictures that can't be decoded count for nothing, instead of ending the run");
  app.add_flag("--rand-augment", flags.augment, "Two random operations on each picture, as RandAugment");
  app.add_option("--mixup", flags.mixup, "Mixes each sample with another of the rank; the alpha of Beta(alpha, alpha), such as 0.2")
      ->check(from_to(0.0, 100.0));
  app.add_option("--cutmix", flags.cutmix, "Pastes a part of another sample of the rank; the alpha, such as 1; with --mixup one of the two")
      ->check(from_to(0.0, 100.0));
}

inline void declare_training(CLI::App& app, Flags& flags) {
  using tessera::cli::from_to;
  using tessera::cli::one_of;
  app.add_option("--optimizer", flags.optimizer, "The optimizer")->capture_default_str()->check(one_of({"sgd", "adamw"}));
  app.add_option("--lr", flags.lr, "Highest learning rate; unless given 0.5 for resnet50, 0.1 for the others, with adamw 0.001")
      ->check(from_to(0.0, 1000.0));
  app.add_option("--momentum", flags.momentum, "Of SGD")->capture_default_str()->check(from_to(0.0, 1.0));
  app.add_option("--weight-decay", flags.weight_decay, "Of all parameters")->capture_default_str()->check(from_to(0.0, 1000.0));
  app.add_option("--lr-scheduler-type", flags.schedule,
                 "Divided every so many epochs, along a cosine to 0, or the same all the time; the first two after a warm-up")
      ->capture_default_str()
      ->check(one_of({"WarmupAndExponentialDecayScheduler", "cosine", "none"}));
  app.add_option("--num-warmup-epochs", flags.warmup, "Epochs in which the learning rate rises")
      ->capture_default_str()
      ->check(from_to(0.0, 1e6));
  app.add_option("--lr-scheduler-divide-every-n-epochs", flags.divide_every, "Epochs after which it is divided")
      ->capture_default_str()
      ->check(from_to(1, 1'000'000));
  app.add_option("--lr-scheduler-divisor", flags.divisor, "By what")->capture_default_str()->check(from_to(1e-6, 1e6));
  app.add_option("--label-smoothing", flags.smoothing, "The share of a target that all classes get")
      ->capture_default_str()
      ->check(from_to(0.0, 1.0));
  app.add_option("--ema", flags.average,
                 "A moving average of the weights with this decay, such as 0.999, is tested and written by --output in their place; "
                 "batch norms keep their own statistics")
      ->check(from_to(0.0, 0.999999));
  app.add_option("--eval-interval", flags.eval_interval, "Epochs between two tests")->capture_default_str()->check(from_to(1, 1'000'000));
  app.add_flag("--test-only-at-end", flags.test_at_end, "Test once");
  app.add_option("--num-steps", flags.run.steps, "The same as --max-steps")->check(from_to(0, 1'000'000'000))->excludes("--max-steps");
  app.add_option("--logdir", flags.logdir, "Where to write the numbers of each report for TensorBoard, and the trace of --profile")
      ->type_name("FOLDER");
  app.add_flag("--profile", flags.profile, "Write a trace of a few steps to --logdir, or to the folder profile");
}

inline void declare_sharding(CLI::App& app, Flags& flags) {
  using tessera::cli::one_of;
  app.add_flag("--use-nested-fsdp", flags.nested, "Shard each block of the network as a unit of its own, as type_based does");
  app.add_option("--auto-wrap-policy", flags.wrap, "Which modules become units: those of some size, or the blocks of the network")
      ->capture_default_str()
      ->check(one_of({"none", "size_based", "type_based"}));
  app.add_option("--auto-wrap-min-num-params", flags.wrap_size, "Parameters in a unit of size_based")
      ->default_str("1e6")
      ->check(tessera::cli::from_to(1.0, 1e15));
  app.add_flag("--use-gradient-checkpointing", flags.gradient_checkpointing,
               "Run units again in backward instead of keeping activations; without units, the network");
  app.add_flag("--shard-param-on-dim-0", flags.rows, "Each rank has rows of each parameter; not on XLA devices");
  app.add_flag("--fp32-reduce-scatter", flags.fp32_reduce,
               "Gradients of a lower dtype are sent in float32, over c10d and on XLA devices; others add in float32 anyway");
  app.add_flag("--channels-last", flags.channels_last,
               "Images with their channels together in memory, as convolutions on CPUs and GPUs like them");
}

/// Throws ConfigError for flags that contradict others, or would do nothing beside them.
inline void expect_sense(const CLI::App& app, const Flags& flags) {
  if (flags.fake_data == !flags.datadir.empty())
    throw tessera::ConfigError("give either --datadir FOLDER, with train/ and val/, or --fake-data");
  if (flags.nested && flags.wrap != "none")
    throw tessera::ConfigError("--use-nested-fsdp and --auto-wrap-policy both say what the units are; leave one of them out");
  const bool divides = flags.schedule == "WarmupAndExponentialDecayScheduler";
  const std::tuple<const char*, bool, const char*> idle[] = {
      {"--skip-damaged", flags.fake_data, "is for files, and --fake-data has none"},
      {"--rand-augment", flags.fake_data, "is for files, and --fake-data has none"},
      {"--momentum", flags.optimizer != "sgd", "is of SGD; leave it out, or take --optimizer sgd"},
      {"--lr-scheduler-divide-every-n-epochs", !divides, "is for the schedule WarmupAndExponentialDecayScheduler"},
      {"--lr-scheduler-divisor", !divides, "is for the schedule WarmupAndExponentialDecayScheduler"},
      {"--num-warmup-epochs", flags.schedule == "none", "is of a schedule; give --lr-scheduler-type"},
      {"--eval-interval", flags.test_at_end, "says when to test, and --test-only-at-end not to"},
      {"--auto-wrap-min-num-params", flags.wrap != "size_based", "is for --auto-wrap-policy size_based"},
      {"--no-ckpt-consolidation", flags.run.prefix.empty(), "is for runs with --ckpt-prefix; others consolidate nothing"},
  };
  for (const auto& [name, is_idle, why] : idle) {
    if (is_idle && app.count(name) > 0) throw tessera::ConfigError(std::string(name) + " " + why);
  }
}

/// Throws ConfigError for images that the network does not take.
inline void expect_image(const Flags& flags) {
  const auto& network = tessera::models::image_network(flags.model);
  const auto smallest = network.smallest;
  if (flags.image < smallest) {
    throw tessera::ConfigError("--image-size {}: {} takes images of at least {}; raise --image-size", flags.image, flags.model, smallest);
  }
  if (network.blocks == "VitBlock" && flags.image % smallest != 0) {
    throw tessera::ConfigError("--image-size {0}: {1} cuts images into patches of {2} by {2}; give a multiple of {2}", flags.image,
                               flags.model, smallest);
  }
}

inline void declare(CLI::App& app, Flags& flags) {
  app.add_option("--model", flags.model, "The network")
      ->capture_default_str()
      ->check(tessera::cli::one_of(tessera::models::image_model_names()));
  app.add_option("--weights", flags.weights, "Weights to begin with: a file or a folder of torchvision, timm or this recipe")
      ->type_name("FILE");
  app.add_flag("--new-head", flags.new_head, "Without their last layer, to train for other classes")->needs("--weights");
  app.add_option("--output", flags.output, "Where to write the trained weights, as model.safetensors")->type_name("FOLDER");
  declare_data(app, flags);
  add_recipe_flags(app, flags, "Samples per rank and step", "Of new weights, and of the order and the augmentation of samples");
  declare_training(app, flags);
  declare_sharding(app, flags);
  add_example_flags(app, flags);
  add_target_flag(app, flags);
  app.callback([&app, &flags] {
    expect_sense(app, flags);
    if (flags.image == 0) flags.image = tessera::models::image_network(flags.model).image;
    expect_image(flags);
    if (!flags.lr) flags.lr = flags.optimizer == "adamw" ? 1e-3 : flags.model == "resnet50" ? 0.5 : 0.1;
    if (flags.profile) flags.run.trace = flags.logdir.empty() ? "profile" : flags.logdir;
    if (!flags.logdir.empty()) flags.metrics.push_back((flags.logdir / "").string());
  });
}
