#include "tessera/train/evaluation.h"

namespace tessera::train {

Evaluation::Evaluation(torch::nn::Module& model, data::Loader& loader, const Communicator& world)
    : model_(model),
      loader_(loader),
      world_(world),
      was_training_(model.is_training()),
      progress_({.title = "evaluating", .steps = loader.batches(), .at_end = AtEnd::Vanishes, .rank = world.local_ranks().front()}) {
  model_.eval();
  loader_.seek({.epoch = loader_.position().epoch});
}

Evaluation::~Evaluation() {
  model_.train(was_training_);
}

void Evaluation::batch_done() {
  world_.step_done();
  progress_.update(loader_.position().batch);
}

}  // namespace tessera::train
