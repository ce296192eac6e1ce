// Trains a small model on the ranks that tessera launch has started, for the record of a run. `report_train sick`: most layers are in one unit, and
// rank 2 sleeps in each step. `report_train healthy`: each layer is a unit, and all ranks sleep.
#include <tessera/tessera.h>
#include <torch/torch.h>

#include <cstdlib>
#include <string_view>
#include <thread>
#include <vector>

#include "../../bench/bench.h"

namespace {

using namespace tessera;

constexpr int64_t kWidth = 768, kFirst = 5, kLeastSteps = 50;
constexpr double kLeastSeconds = 4;  // of which each second is a line of the record

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(int64_t layers) {
    register_module("layers", layers_);
    for (int64_t i = 0; i < layers; i++) {
      layers_->push_back(torch::nn::Linear(kWidth, kWidth));
      layers_->push_back(torch::nn::Tanh());
    }
  }
  torch::Tensor forward(const torch::Tensor& x) { return layers_->forward(x); }

 private:
  torch::nn::Sequential layers_;
};
TORCH_MODULE(Block);

void run(bool is_sick) {
  const auto world = init();
  torch::manual_seed(1);
  torch::nn::Sequential model;
  for (const auto layers : is_sick ? std::vector<int64_t>{14, 1, 1} : std::vector<int64_t>(16, 1)) model->push_back(Block(layers));
  fully_shard(model, {.mesh = world, .residence = Residence::Gathered}, wrap_classes({"Block"}));
  torch::manual_seed(1 + world.rank());
  optim::SGD optimizer(parameters(*model), {.lr = 0.01});
  train::JsonlReporter metrics(std::filesystem::path(std::getenv("TESSERA_RECORD")) / "metrics.jsonl");
  const auto step = [&](int64_t number) {
    const auto loss = model->forward(torch::randn({4, kWidth})).square().mean();
    loss.backward();
    optimizer.step();
    optimizer.zero_grad();
    metrics.write(number, {{"loss", loss.item<double>()}});
  };
  step(1);
  const auto seconds = bench::seconds_of_slowest(world, [&] {
                         for (int64_t i = 2; i <= kFirst; i++) step(i);
                       }) / (kFirst - 1);
  const auto steps = std::max(kLeastSteps, static_cast<int64_t>(kLeastSeconds / seconds));
  const std::chrono::duration<double> sleep(is_sick && world.rank() != 2 ? 0 : seconds / 3);
  for (int64_t i = kFirst + 1; i <= steps; i++) {
    std::this_thread::sleep_for(sleep);
    step(i);
  }
}

}  // namespace

int main(int argc, char** argv) {
  run(argc == 2 && std::string_view(argv[1]) == "sick");
}
