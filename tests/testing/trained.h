// Helpers for tests of the Trainer.
#pragma once

#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/checkpoint/checkpoint.h"
#include "tessera/train/trainer.h"
#include "tests/testing/net.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing {

inline TrainerOptions options_for(const Communicator& world, std::map<std::string, std::string> settings = {}) {
  return {.world = world, .settings = std::move(settings)};
}

/// State that a checkpoint must have although no prepared object holds it.
struct Phase {
  int64_t number = 0;
  std::string save() const { return std::to_string(number); }
  static Phase load(const std::string& text) { return {.number = std::stoll(text)}; }
};

inline std::vector<at::Tensor> whole_values(const torch::nn::Module& model) {
  std::vector<at::Tensor> values;
  for (const auto& [name, tensor] : checkpoint::full_state_dict(model)) values.push_back(tensor);
  return values;
}

inline at::Tensor squared_output(Net& net, int64_t number) {
  return net->forward(input(number)).pow(2).mean();
}

inline data::Loader numbers_loader(const Communicator& world, int64_t size) {
  return data::Loader(
      data::Sampler({.size = size, .global_batch = world.size(), .local_ranks = world.local_ranks(), .ranks = world.size()}),
      [](std::span<const int64_t> numbers) {
        return data::Samples{.inputs = at::tensor(numbers, at::TensorOptions(at::kCPU).dtype(at::kLong)), .targets = {}};
      },
      {.workers = 1});
}

}  // namespace tessera::testing
