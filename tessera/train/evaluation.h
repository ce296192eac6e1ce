// Evaluation: a pass over a loader, in eval mode and without gradients.
#pragma once

#include <ATen/core/grad_mode.h>
#include <torch/nn/module.h>

#include <iterator>
#include <optional>
#include <utility>
#include <vector>

#include "tessera/base/module_ref.h"
#include "tessera/comm/communicator.h"
#include "tessera/data/loader.h"
#include "tessera/train/progress.h"

namespace tessera::train {

/// Written as: for (auto& batch : trainer.evaluation(model, loader)). Shows progress during the pass.
class Evaluation {
 public:
  Evaluation(ModuleRef model, data::Loader& loader, const Communicator& world);
  Evaluation(const Evaluation&) = delete;
  Evaluation& operator=(const Evaluation&) = delete;
  ~Evaluation();  // restores the training modes of modules, and the position and the last batch of the loader

  data::BatchIterator<Evaluation> begin() { return data::BatchIterator(*this); }
  std::default_sentinel_t end() { return {}; }

 private:
  friend class data::BatchIterator<Evaluation>;
  std::optional<data::Samples> next();
  data::Loop loop() { return loader_.loop(); }
  void end_step();

  const at::NoGradGuard no_grad_;
  data::Loader& loader_;
  const Communicator world_;
  const data::Position position_;
  const data::Taken taken_;
  std::vector<std::pair<torch::nn::Module*, bool>> modes_;
  Progress progress_;
};

}  // namespace tessera::train
