// Saves everything that a later run needs, and resumes from there when started again: tessera launch -n 2 resume [PREFIX [EPOCHS]]
#include <tessera/models/mnist.h>
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdio>
#include <cstdlib>
#include <string>

using namespace tessera;

int main(int argc, char** argv) {
  const std::string prefix = argc > 1 ? argv[1] : "run/images";
  const int64_t epochs = argc > 2 ? std::atoll(argv[2]) : 2;
  if (epochs < 1) throw UsageError("usage: resume [PREFIX [EPOCHS]]");
  const auto world = init();
  const checkpoint::PrefixLock lock(prefix, world);  // no other job saves here
  torch::manual_seed(1);
  models::MnistNet model;
  fully_shard(model);
  torch::optim::SGD optimizer(model->parameters(), torch::optim::SGDOptions(0.02).momentum(0.9));
  checkpoint::Contents contents{.model = model.get(), .optimizer = &optimizer};
  int64_t step = 0;
  data::Position position;
  if (const auto last = checkpoint::latest(prefix, world)) {
    checkpoint::load(*last, contents, world);
    step = contents.notes.at("step").as<int64_t>();
    position = contents.notes.at("position").as<data::Position>();
  }

  auto images = data::fake_images({.count = 2000});  // or data::read_idx_folder("/usr/share/datasets/fashion-mnist")
  images.inputs = images.inputs.to(torch::kFloat).div_(255).unsqueeze_(1);
  images.targets = images.targets.to(torch::kLong);
  data::Loader loader(
      data::Sampler({.size = images.size(), .global_batch = 64, .local_ranks = world.local_ranks(), .ranks = world.size(), .seed = 1}),
      [&](std::span<const int64_t> numbers) { return data::pick(images, numbers); }, {.start = position});

  checkpoint::AsyncSaver saver(world);
  train::StopSignal stop(world);
  while (loader.position().epoch < epochs && !stop.requested()) {
    const auto before = step;
    torch::Tensor loss;
    for (const auto& batch : loader) {
      loss = torch::nll_loss(model(batch.inputs), batch.targets);
      loss.backward();
      optimizer.step();
      optimizer.zero_grad();
      step++;
      saver.poll();                 // throws if the last save has failed
      if (stop.requested()) break;  // Ctrl-C, SIGTERM or SIGUSR1, on any rank
    }
    if (step == before) continue;  // the run has resumed at the end of an epoch, so there is nothing new to save
    contents.notes["step"] = step;
    contents.notes["position"] = loader.position();
    const auto folder = checkpoint::step_folder(prefix, step);
    saver.save(folder, contents, {.keep = checkpoint::Keep{.last = 3}});  // training continues meanwhile
    if (world.rank() == 0) std::printf("step %lld loss %.4f\n", static_cast<long long>(step), loss.item<double>());
  }
  saver.wait();
}
