#include "tessera/train/evaluation.h"

namespace tessera::train {

Evaluation::Evaluation(torch::nn::Module& model, data::Loader& loader, const Communicator& world)
    : loader_(loader),
      world_(world),
      position_(loader.position()),
      progress_({.title = "evaluating", .steps = loader.batches(), .at_end = AtEnd::Vanishes, .rank = world.local_ranks().front()}) {
  for (const auto& module : model.modules()) {
    if (module->is_training()) training_.push_back(module);
  }
  model.eval();
  loader_.seek({.epoch = loader_.position().epoch});
}

Evaluation::~Evaluation() {
  for (const auto& module : training_) module->train();
  loader_.seek(position_);
}

void Evaluation::batch_done() {
  world_.step_done();
  progress_.update(loader_.position().batch);
}

}  // namespace tessera::train
