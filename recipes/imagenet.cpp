// Trains the networks of torchvision and timm on pictures in folders or tar shards, with the flags of PyTorch/XLA's ImageNet example.
#include <fmt/format.h>
#include <tessera/models.h>
#include <tessera/tessera.h>
#include <tessera/vision.h>
#include <torch/torch.h>

#include "imagenet_flags.h"

namespace {

using namespace tessera;
using data::Split;

struct Images {
  int64_t size = 0;
  std::vector<std::string> classes = {};
  std::string fingerprint = {};
  data::SeededFetch fetch = {};
  std::shared_ptr<vision::Damaged> damaged = {};
};

/// A few generated images, which are repeated.
Images generate(const Flags& flags, Split split) {
  const int64_t few = split == Split::Train ? 1000 : 200, many = split == Split::Train ? 1'200'000 : 50'000;
  const auto made = data::fake_images({.count = 100, .height = flags.image, .width = flags.image, .split = split});
  const auto fetch = [made](std::span<const int64_t> numbers, std::span<const uint64_t> /*seeds*/) {
    std::vector<int64_t> places(numbers.begin(), numbers.end());
    for (auto& place : places) place %= made.size();
    const auto batch = data::pick(made, places);
    const auto grey = batch.inputs.to(torch::kFloat).div_(128).sub_(1);
    return data::Samples{.inputs = grey.unsqueeze(1).expand({-1, 3, -1, -1}), .targets = batch.targets.to(torch::kLong)};
  };
  return {.size = flags.small_sample ? few : many, .classes = std::vector<std::string>(1000), .fetch = fetch};
}

Images read(const Flags& flags, Split split) {
  const auto set = set_in(flags.datadir / (split == Split::Train ? "train" : "val"));
  const auto normalize = normalize_of(flags);
  const auto damaged = flags.skip_damaged ? std::make_shared<vision::Damaged>() : nullptr;
  Images images{.size = set.size(), .classes = set.classes, .fingerprint = set.fingerprint(), .damaged = damaged};
  if (split == Split::Train) {
    vision::TrainTransform transform{.crop = {.size = flags.image}, .normalize = normalize, .may_shrink = true};
    if (flags.augment) transform.augment.emplace();
    images.fetch = vision::fetch_images(set, transform, damaged);
  } else {
    const vision::TestTransform transform{
        .shorter_side = vision::usual_shorter_side(flags.image), .size = flags.image, .normalize = normalize};
    images.fetch = [fetch = vision::fetch_images(set, transform, damaged)](auto numbers, auto /*seeds*/) { return fetch(numbers); };
  }
  return images;
}

Images images_of(const Flags& flags, Split split) {
  auto images = flags.fake_data ? generate(flags, split) : read(flags, split);
  auto fetch = images.fetch;
  if (split == Split::Train)
    fetch = vision::mix(fetch, {.mixup = flags.mixup, .cutmix = flags.cutmix, .classes = std::ssize(images.classes)});
  const auto order = flags.channels_last ? at::MemoryFormat::ChannelsLast : at::MemoryFormat::Contiguous;
  images.fetch = [fetch, order](auto numbers, auto seeds) {
    auto batch = fetch(numbers, seeds);
    batch.inputs = batch.inputs.contiguous(order);
    return batch;
  };
  return images;
}

/// In percent of all pictures that are not damaged.
train::Values accuracy_of(const std::shared_ptr<models::ImageModel>& model, const Images& test, const Flags& flags,
                          const Trainer& trainer) {
  data::Loader loader(trainer.make_sampler({.size = test.size,
                                            .global_batch = flags.test_batch_size * trainer.num_processes(),
                                            .order = data::Order::AsStored,
                                            .tail = data::Tail::Fill}),
                      test.fetch, {.workers = flags.workers});
  auto counts = torch::zeros({3}, torch::TensorOptions(trainer.world().traits().device).dtype(torch::kLong));
  for (const auto& batch : trainer.evaluation(model, loader)) {
    const auto scores = call(model, batch.inputs);
    const auto best = std::get<1>(scores.topk(std::min<int64_t>(5, scores.size(1)), 1));
    const auto [answers, labels] = trainer.gather_for_metrics({best, batch.targets}, batch);
    const auto right = answers.eq(labels.unsqueeze(1));  // labels of damaged pictures are negative
    counts += torch::stack({right.select(1, 0).sum(), right.sum(), labels.ge(0).sum()});
  }
  if (test.damaged) test.damaged->names_on(trainer.world());  // throws if all are damaged
  const auto shares = counts.cpu().to(torch::kDouble) * 100 / std::max<int64_t>(counts[2].item<int64_t>(), 1);
  return {{"accuracy", shares[0].item<double>()}, {"accuracy_top_5", shares[1].item<double>()}};
}

int train_and_test(const Flags& flags) {
  Trainer trainer(options_of(flags));
  const auto training = images_of(flags, Split::Train), test = images_of(flags, Split::Test);
  if (const auto [own, other] = std::ranges::mismatch(test.classes, training.classes); own != test.classes.end()) {
    const auto val_lacks = other != training.classes.end() && *other < *own;  // both are sorted
    throw ConfigError("{}: {} lacks the class '{}' of {}", flags.datadir.string(), val_lacks ? "val/" : "train/", val_lacks ? *other : *own,
                      val_lacks ? "train/" : "val/");
  }
  const auto make = [&] { return models::make_image_model(flags.model, {.classes = std::ssize(training.classes), .image = flags.image}); };
  auto model = deferred_init(make, {.seed = flags.seed});
  trainer.prepare(model);
  if (!flags.weights.empty()) with_advice(flags, [&] { checkpoint::load_weights(model, flags.weights, weights_of(flags)); });
  trainer.set_seed(flags.seed, {.device_specific = true});  // each rank drops out other values
  data::Loader loader(trainer.make_sampler({.size = training.size,
                                            .global_batch = flags.batch_size * trainer.num_processes(),
                                            .tail = flags.drop_last ? data::Tail::Drop : data::Tail::Fill,
                                            .seed = flags.seed}),
                      training.fetch, {.workers = flags.workers, .data = training.fingerprint});
  const auto optimizer = make_optimizer(flags, parameters(*model));
  trainer.prepare(*optimizer, loader, rate_of(flags, trainer.steps_of_epoch(loader)));
  std::optional<optim::Average> average;
  if (flags.average > 0) trainer.prepare(average.emplace(model, optim::AverageOptions{.decay = flags.average}));

  auto run = with_advice(flags, [&] { return train::Run(trainer, loader, flags.run); });
  if (run.last_checkpoint() && !flags.weights.empty()) run.say("the run was resumed, so --weights is not used");
  int64_t tested = -1;  // the step
  double best = 0;
  const auto test_now = [&] {
    const auto values = accuracy_of(model, test, flags, trainer);
    trainer.log(values);
    run.say(fmt::format("step {}: accuracy {:.2f} %, {:.2f} % in the top 5", trainer.steps(), values[0].value, values[1].value));
    tested = trainer.steps();
    best = std::max(best, values[0].value);
  };
  const auto with_average = [&](const auto& act) {  // with the average, if there is one, in place of the weights
    if (!average) return act();
    const auto swapped = average->swapped();
    act();
  };
  while (run.next_epoch()) {
    for (const auto& batch : run.batches()) {
      const auto accumulation = trainer.accumulate();
      const auto loss = loss_of(flags, call(model, batch.inputs).to(torch::kFloat), batch.targets);
      trainer.backward(loss);
      const auto norm = run.is_due() ? trainer.grad_norm() : torch::Tensor();
      if (trainer.step() && average) average->update();
      run.report({{"loss", loss}, {"grad_norm", norm}});
    }
    if (run.stopped()) break;
    if (training.damaged) training.damaged->names_on(trainer.world());
    sync_buffers(*model, trainer.world());
    run.save();
    if (!flags.test_at_end && run.epoch() % flags.eval_interval == 0) with_average(test_now);
  }
  if (run.stopped()) return 0;
  if (tested != trainer.steps()) with_average(test_now);
  tell_of_damaged({training.damaged, test.damaged}, trainer, run);
  if (!flags.output.empty()) with_average([&] { trainer.save_model(model, flags.output); });
  if (const auto file = consolidate(run, flags, trainer); !file.empty()) {
    const auto plain = make();
    checkpoint::load_weights(plain, file);
    move_module(*plain, trainer.world().traits().device);
    const auto consolidated = accuracy_of(plain, test, flags, trainer)[0].value;
    trainer.log({{"consolidated_accuracy", consolidated}});
    run.say(fmt::format("accuracy {:.2f} %, consolidated in {}", consolidated, file));
  }
  return status_of(best, flags, run);
}

}  // namespace

int main(int argc, char** argv) {
  cli::Program app("Trains the networks of torchvision and timm on pictures.", "imagenet",
                   {"tessera launch -n 2 imagenet --datadir ILSVRC --use-nested-fsdp",
                    "imagenet --datadir flowers --weights resnet50.pth --new-head --output tuned",
                    "imagenet --fake-data --model vit_10b --compile-for v5p:4x4x8,wrap=1,1,1"});
  Flags flags;
  declare(app, flags);
  app.add_device_flags();
  app.set_reasons(why_not);
  return app.run(argc, argv, [&] { return train_and_test(flags); });
}
