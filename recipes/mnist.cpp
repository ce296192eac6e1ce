// Trains the network of PyTorch/XLA's MNIST example on sharded ranks, saves the part of each rank, consolidates the parts into one file,
// and evaluates a plain, unsharded model with it.
#include <fmt/format.h>
#include <tessera/models/mnist.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include "mnist_flags.h"

namespace {

using namespace tessera;
using models::MnistNet;

constexpr double kMean = 0.1307, kDeviation = 0.3081;

/// `tessera launch` may set keys that the flags do not set.
TrainerOptions options_of(const Flags& flags) {
  auto options = options_of(flags, flags.nested, "Conv2d,Linear");
  if (flags.replicated) options.settings["distributed_type"] = "MULTI_CPU";
  return options;
}

data::Samples read(const Flags& flags, data::Split split) {
  if (flags.fake_data) return data::fake_images({.count = split == data::Split::Train ? 6000 : 1000, .split = split});
  return data::read_idx_folder(flags.datadir, split);
}

/// Returns a function that makes batches in the form that the network needs.
data::Fetch fetch_from(const data::Samples& all) {
  return [all](std::span<const int64_t> numbers) {
    auto batch = data::pick(all, numbers);
    batch.inputs = batch.inputs.to(torch::kFloat).div_(255).sub_(kMean).div_(kDeviation).unsqueeze_(1);
    batch.targets = batch.targets.to(torch::kLong);
    return batch;
  };
}

double accuracy_of(MnistNet& model, const data::Samples& test, const Trainer& trainer) {
  data::Loader loader(trainer.make_sampler({.size = test.size(),
                                            .global_batch = int64_t{250} * trainer.num_processes(),
                                            .order = data::Order::AsStored,
                                            .tail = data::Tail::Fill}),
                      fetch_from(test), {.workers = 0});
  auto right = torch::zeros({}, torch::TensorOptions(trainer.world().traits().device).dtype(torch::kLong));
  for (const auto& batch : trainer.evaluation(model, loader)) {
    const auto [answers, labels] = trainer.gather_for_metrics({call(model, batch.inputs).argmax(1), batch.targets}, batch);
    right += answers.eq(labels).sum();
  }
  return 100 * right.item<double>() / static_cast<double>(test.size());
}

int train_and_test(const Flags& flags) {
  Trainer trainer(options_of(flags));
  const auto training = read(flags, data::Split::Train), test = read(flags, data::Split::Test);
  trainer.set_seed(flags.seed);  // the same weights on every rank
  auto model = trainer.make_model([] { return MnistNet(); });
  if (flags.gradient_checkpointing) activation::checkpoint_module(model);
  data::Loader loader(trainer.make_sampler({.size = training.size(),
                                            .global_batch = flags.batch_size * trainer.num_processes(),
                                            .tail = flags.drop_last ? data::Tail::Drop : data::Tail::Fill,
                                            .seed = flags.seed}),
                      fetch_from(training), {.workers = flags.workers, .data = data::fingerprint(training)});
  trainer.prepare(model, loader);
  optim::SGD optimizer(parameters(*model), {.lr = flags.lr, .momentum = flags.momentum});
  trainer.prepare(optimizer);

  train::Run run(trainer, loader, flags.run);
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      const auto accumulation = trainer.accumulate();
      const auto scores = call(model, batch.inputs).to(torch::kFloat);
      const auto loss = torch::nll_loss(scores, batch.targets);
      trainer.backward(loss);
      const auto norm = run.is_due() ? trainer.grad_norm() : torch::Tensor();
      trainer.step();
      run.report({{"loss", loss}, {"train_accuracy", train::accuracy(scores, batch.targets)}, {"grad_norm", norm}});
    }
    if (run.stopped()) break;
    sync_buffers(*model, trainer.world());
    run.save();
    run.say(fmt::format("epoch {}/{}: accuracy {:.2f} %", run.epoch(), *flags.run.epochs, accuracy_of(model, test, trainer)));
  }
  if (run.stopped()) return 0;

  const double accuracy = accuracy_of(model, test, trainer);
  auto text = fmt::format("accuracy {:.2f} % {}", accuracy, flags.replicated ? "replicated" : "sharded");
  train::Values values = {{"accuracy", accuracy}};
  if (const auto file = consolidate(run, flags, trainer); !file.empty()) {
    MnistNet plain;
    checkpoint::load_weights(*plain, file);
    move_module(*plain, trainer.world().traits().device);
    values.push_back({"consolidated_accuracy", accuracy_of(plain, test, trainer)});
    text += fmt::format(", {:.2f} % consolidated in {}", values.back().value, file);
  }
  trainer.log(values);
  run.say(text);
  return status_of(accuracy, flags, run);
}

}  // namespace

int main(int argc, char** argv) {
  cli::Program app("Trains the MNIST network of the PyTorch/XLA example.", "mnist",
                   {"tessera launch -n 2 mnist --use-nested-fsdp --ckpt-prefix run/mnist", "mnist --fake-data --num-epochs 1"});
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  return app.run(argc, argv, [&] { return train_and_test(flags); });
}
