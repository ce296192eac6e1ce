// Trains on the images of a data set, saves what a later run needs, and goes on from there when it is started again:
// resume PREFIX [EPOCHS]
#include <tessera/models/mnist.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cmath>
#include <cstdio>
#include <random>
#include <string>

using namespace tessera;

int main(int argc, char** argv) {
  const auto world = init();
  const std::string prefix = argc > 1 ? argv[1] : "run/images";
  const int64_t epochs = argc > 2 ? std::stoll(argv[2]) : 2;
  const checkpoint::PrefixLock lock(prefix, world);  // no other job saves here

  torch::manual_seed(1);
  models::MnistNet model;
  fully_shard(model, {.mesh = world});
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));

  checkpoint::Contents contents{.model = model.get(), .optimizer = &optimizer};
  int64_t step = 0;
  data::Position position;
  if (const auto last = checkpoint::latest(prefix, world)) {
    checkpoint::load(*last, contents, world);
    step = contents.notes.at("step").as<int64_t>();
    position = contents.notes.at("position").as<data::Position>();
  }

  const auto images = data::fake_images({.count = 2000});  // or data::read_idx_folder("/usr/share/datasets/fashion-mnist")
  data::Loader loader(
      data::Sampler({.size = images.size(), .global_batch = 64, .local_ranks = world.local_ranks(), .ranks = world.size(), .seed = 1}),
      [&](std::span<const int64_t> numbers, std::span<const uint64_t> seeds) {
        auto batch = data::pick(images, numbers);
        batch.inputs = batch.inputs.to(torch::kFloat).div_(255).unsqueeze_(1);
        batch.targets = batch.targets.to(torch::kLong);
        for (int64_t i = 0; i < batch.size(); i++) {  // each image is mirrored or not, in every epoch anew
          std::mt19937_64 random(seeds[static_cast<size_t>(i)]);
          if (random() % 2 == 0) batch.inputs[i] = batch.inputs[i].flip(2);
        }
        return batch;
      },
      {.start = position});

  checkpoint::AsyncSaver saver(world);
  int64_t saved = step;
  const auto save = [&] {
    if (step == saved) return;  // the run has gone on at the end of an epoch: there is nothing new
    contents.notes["step"] = step;
    contents.notes["position"] = loader.position();
    // Training goes on while it is written.
    saver.save(checkpoint::step_folder(prefix, step), contents, {.keep = checkpoint::Keep{.last = 3}});
    saved = step;
  };

  train::StopSignal stop(world);
  double loss = std::nan("");
  while (loader.position().epoch < epochs && !stop.requested()) {
    for (const auto& batch : loader) {
      const auto error = torch::nll_loss(model(batch.inputs), batch.targets);
      error.backward();
      optimizer.step();
      optimizer.zero_grad();
      loss = error.item<double>();
      step++;
      saver.poll();                 // throws if the last save has failed
      if (stop.requested()) break;  // SIGTERM or SIGUSR1, on any rank
    }
    save();
  }
  saver.wait();
  // The loss is NaN if nothing was left to do.
  if (world.rank() == 0) std::printf("step %lld loss %.4f\n", static_cast<long long>(step), loss);
}
