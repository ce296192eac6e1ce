// Trains the network of PyTorch/XLA's MNIST example on sharded ranks, saves what each rank has, puts it together into one file, and shows
// that a plain, unsharded model can use it.
#include <fmt/format.h>
#include <tessera/models/mnist.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <filesystem>

#include "mnist_flags.h"

namespace {

using namespace tessera;
using models::MnistNet;

constexpr int kBelowTarget = 21;  // exit status
constexpr double kMean = 0.1307, kDeviation = 0.3081;

/// What the flags say of the configuration. What they leave open, launch may have set.
TrainerOptions options_of(const Flags& flags) {
  TrainerOptions options;
  auto& settings = options.settings;
  if (flags.replicated) settings["distributed_type"] = "MULTI_CPU";
  if (flags.compute_dtype != "float32") settings["mixed_precision"] = flags.compute_dtype == "float16" ? "fp16" : "bf16";
  if (flags.flatten) settings["fsdp_use_orig_params"] = "false";
  if (flags.nested) settings["fsdp_auto_wrap_policy"] = "TRANSFORMER_BASED_WRAP";
  if (flags.nested) settings["fsdp_transformer_layer_cls_to_wrap"] = "Conv2d,Linear";
  return options;
}

MnistNet make_model(const Flags& flags, Trainer& trainer) {
  trainer.set_seed(flags.seed);  // the same weights on every rank
  auto model = trainer.make_model([] { return MnistNet(); });
  if (flags.gradient_checkpointing) activation::checkpoint_module(model);
  trainer.prepare(model);
  return model;
}

data::Samples read(const Flags& flags, data::Split split) {
  if (flags.fake_data) return data::fake_images({.count = split == data::Split::Train ? 6000 : 1000, .split = split});
  return data::read_idx_folder(flags.datadir, split);
}

/// The images of a batch as the network wants them.
data::Fetch fetch_from(data::Samples all) {
  return [all = std::move(all)](std::span<const int64_t> numbers) {
    auto batch = data::pick(all, numbers);
    batch.inputs = batch.inputs.to(torch::kFloat).div_(255).sub_(kMean).div_(kDeviation).unsqueeze_(1);
    batch.targets = batch.targets.to(torch::kLong);
    return batch;
  };
}

double evaluate(MnistNet& model, const data::Samples& test, const Communicator& world) {
  const torch::NoGradGuard no_grad;
  model->eval();
  data::Loader loader(data::Sampler({.size = test.size(),
                                     .global_batch = int64_t{250} * world.size(),
                                     .local_ranks = world.local_ranks(),
                                     .ranks = world.size(),
                                     .order = data::Order::AsStored,
                                     .tail = data::Tail::Fill}),
                      fetch_from(test), {.workers = 0});
  train::Progress progress(
      {.title = "evaluating", .steps = loader.batches(), .at_end = train::AtEnd::Vanishes, .rank = world.local_ranks().front()});
  auto right = torch::zeros({1}, torch::TensorOptions(world.traits().device).dtype(torch::kDouble));
  for (const auto& batch : loader) {
    const auto counted = torch::arange(batch.size()).lt(batch.size() - batch.repeats);
    const auto hits = model(world.to_local_ranks(batch.inputs)).argmax(1).eq(world.to_local_ranks(batch.targets));
    right += hits.logical_and(world.to_local_ranks(counted)).sum();
    world.step_done();
    progress.update(loader.position().batch);
  }
  world.all_reduce(right, {}, {.unit = "accuracy"}).wait();
  model->train();
  return 100 * right.item<double>() / static_cast<double>(test.size());
}

/// One run, from its flags to what it has learnt.
class MnistRun {
 public:
  explicit MnistRun(const Flags& flags)
      : flags_(flags),
        trainer_(options_of(flags)),
        train_(read(flags, data::Split::Train)),
        test_(read(flags, data::Split::Test)),
        model_(make_model(flags, trainer_)),
        optimizer_(parameters(*model_), {.lr = flags.lr, .momentum = flags.momentum}) {
    trainer_.prepare(optimizer_);
  }

  int run() {
    if (!flags_.ckpt_prefix.empty()) {
      lock_.emplace(flags_.ckpt_prefix, world_);
      stop_.emplace(world_, train::StopOptions{.signals = {SIGINT, SIGTERM, SIGUSR1}});  // Ctrl-C, and what batch systems send
    }
    if (flags_.resume || (restart_count() > 0 && !flags_.ckpt_prefix.empty())) {
      resume();
    } else if (const auto other = flags_.ckpt_prefix.empty() ? std::nullopt : checkpoint::latest(flags_.ckpt_prefix)) {
      throw ConfigError(fmt::format("there is a {} already; go on from it with --resume, or give another --ckpt-prefix", other->string()));
    }
    metrics_.emplace(flags_.metrics, train::ReporterOptions{.first_step = step_ + 1, .rank = world_.local_ranks().front()});
    auto& loader = loader_.emplace(data::Sampler({.size = train_.size(),
                                                  .global_batch = global_batch(),
                                                  .local_ranks = world_.local_ranks(),
                                                  .ranks = world_.size(),
                                                  .tail = flags_.drop_last ? data::Tail::Drop : data::Tail::Fill,
                                                  .seed = flags_.seed}),
                                   fetch_from(train_), data::LoaderOptions{.workers = flags_.workers, .start = position_});
    trainer_.prepare(loader);
    while (position_.epoch < flags_.epochs) {
      if (!train_epoch(loader)) {
        position_ = loader.position();
        save();
        say("stopped by a signal; go on with --resume");
        return 0;
      }
      position_ = {.epoch = position_.epoch + 1, .batch = 0};
      sync_buffers(*model_, world_);
      if (!flags_.ckpt_prefix.empty()) save();
      say("epoch {}/{}: accuracy {:.2f} %", position_.epoch, flags_.epochs, evaluate(model_, test_, world_));
    }
    return finish();
  }

 private:
  /// Returns false if it was stopped before the end of the epoch.
  bool train_epoch(data::Loader& loader) {
    train::Progress progress({.title = fmt::format("epoch {}/{}", position_.epoch + 1, flags_.epochs),
                              .steps = loader.batches(),
                              .start = position_.batch,
                              .items_per_step = flags_.batch_size * world_.size(),
                              .line_every = 10 * flags_.log_steps,
                              .rank = world_.local_ranks().front()});
    int64_t batches = position_.batch;
    for (const auto& batch : loader) {
      const auto accumulation = trainer_.accumulate();
      const auto targets = batch.targets;
      const auto scores = call(model_, batch.inputs).to(torch::kFloat);
      const auto loss = torch::nll_loss(scores, targets);
      trainer_.backward(loss);
      batches++;
      const bool due = trainer_.sync_gradients() && (step_ + 1) % flags_.log_steps == 0;
      const auto norm = due ? trainer_.grad_norm() : torch::Tensor();
      if (trainer_.sync_gradients()) step_++;
      trainer_.step();
      if (due) report(loss.detach(), train::accuracy(scores.detach(), targets), norm);
      progress.update(batches, shown_);
      if (stop_ && trainer_.sync_gradients() && batches < loader.batches() && stop_->requested()) break;
    }
    progress.update(batches, shown_);
    return batches == loader.batches();
  }

  void report(const torch::Tensor& loss, const torch::Tensor& accuracy, const torch::Tensor& norm) {
    const auto means = trainer_.reduce(torch::stack({loss.to(torch::kDouble), accuracy.to(torch::kDouble)}), Reduce::Mean);
    const auto mean_loss = means[0].item<double>();
    const train::Value of_gradients = {"grad_norm", norm.item<double>()}, lr = {"lr", optimizer_.lr()};
    shown_ = {{"loss", running_loss_.add(mean_loss)},
              {"accuracy", running_accuracy_.add(means[1].item<double>())},
              of_gradients,
              lr,
              train::memory()};
    metrics_->write(step_, {{"loss", mean_loss}, lr, of_gradients});
  }

  // What must be the same for a run to go on: the samples would come in another order.
  std::string course() const {
    return fmt::format("seed {}, {} samples{}", flags_.seed, train_.size(), flags_.drop_last ? ", dropping the last" : "");
  }

  int64_t global_batch() const { return flags_.batch_size * world_.size(); }

  void save() {
    last_ = checkpoint::step_folder(flags_.ckpt_prefix, step_);
    const checkpoint::Notes notes = {
        {"step", step_}, {"position", position_}, {"samples", position_.batch * global_batch()}, {"course", course()}};
    checkpoint::save(*last_, {.model = model_.get(), .optimizer = &optimizer_, .notes = notes}, world_);
    say("saved {}", last_->string());
  }

  void resume() {
    const auto folder = checkpoint::latest(flags_.ckpt_prefix);
    if (!folder) return say("no checkpoint {}-step-N yet, starting anew", flags_.ckpt_prefix);
    checkpoint::Contents contents{.model = model_.get(), .optimizer = &optimizer_};
    checkpoint::load(*folder, contents, world_);
    if (const auto saved = contents.notes.at("course").as<std::string>(); saved != course()) {
      throw ConfigError(fmt::format("{} is of a run with {}, this one has {}; give the same flags, or another --ckpt-prefix",
                                    folder->string(), saved, course()));
    }
    step_ = contents.notes.at("step").as<int64_t>();
    position_ = contents.notes.at("position").as<data::Position>();
    const auto samples = contents.notes.at("samples").as<int64_t>();
    if (samples % global_batch() != 0) {
      throw ConfigError(fmt::format(
          "{} was saved after {} samples of an epoch, where batches of {} on all ranks together can't go on; give a --batch-size "
          "whose product with {} ranks divides {}",
          folder->string(), samples, global_batch(), world_.size(), samples));
    }
    position_.batch = samples / global_batch();  // the run may have had another number of ranks
    last_ = folder;
    say("going on from {}", folder->string());
  }

  /// The accuracy as trained, and that of a plain model with the consolidated file.
  int finish() {
    const double sharded = evaluate(model_, test_, world_);
    auto text = fmt::format("accuracy {:.2f} % {}", sharded, flags_.replicated ? "replicated" : "sharded");
    train::Values values = {{"accuracy", sharded}};
    if (last_ && !flags_.no_consolidation) {
      const std::filesystem::path file = flags_.ckpt_prefix + "_consolidated.pth";
      checkpoint::consolidate(*last_, file, world_);
      MnistNet plain;
      checkpoint::load_weights(*plain, file);
      move_module(*plain, world_.traits().device);
      const double consolidated = evaluate(plain, test_, world_);
      text += fmt::format(", {:.2f} % consolidated in {}", consolidated, file.string());
      values.push_back({"consolidated_accuracy", consolidated});
    }
    metrics_->write(step_, values);
    say("{}", text);
    if (sharded >= flags_.target) return 0;
    say("that is below the target of {} %", flags_.target);
    return kBelowTarget;
  }

  template <class... Args>
  void say(fmt::format_string<Args...> text, Args&&... args) const {
    trainer_.print(fmt::format(text, std::forward<Args>(args)...));
  }

  const Flags flags_;
  Trainer trainer_;
  const Communicator world_ = trainer_.world();
  const data::Samples train_, test_;
  MnistNet model_;
  optim::SGD optimizer_;
  std::optional<checkpoint::PrefixLock> lock_;  // of the prefix
  std::optional<train::StopSignal> stop_;
  std::optional<data::Loader> loader_;
  std::optional<train::Reporters> metrics_;
  std::optional<std::filesystem::path> last_;  // checkpoint that was saved or loaded
  data::Position position_;
  int64_t step_ = 0;
  train::RunningMean running_loss_{10}, running_accuracy_{10};
  train::Values shown_;
};

}  // namespace

int main(int argc, char** argv) {
  cli::Program app(
      "Trains the MNIST network of the PyTorch/XLA example. Start it on several ranks with: tessera launch --nproc-per-node 2 "
      "PATH/TO/mnist ...",
      "mnist");
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return MnistRun(flags).run(); });
}
