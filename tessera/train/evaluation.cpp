#include "tessera/train/evaluation.h"

#include "tessera/shard/unsharding.h"

namespace tessera::train {

Evaluation::Evaluation(ModuleRef model, data::Loader& loader, const Communicator& world)
    : loader_(loader),
      world_(world),
      position_(loader.position()),
      taken_(loader.taken()),
      progress_({.title = "evaluating",
                 .steps = loader.batches_of_epoch(loader.position().epoch).value_or(0),
                 .at_end = AtEnd::Vanishes,
                 .rank = world.local_ranks().front()}) {
  modes_.emplace_back(&*model, model->is_training());
  for (const auto& module : model->modules(/*include_self=*/false)) modes_.emplace_back(module.get(), module->is_training());
  model->eval();
  loader_.seek({.epoch = loader_.position().epoch});
}

Evaluation::~Evaluation() {
  for (const auto& [module, trains] : modes_) module->train(trains);  // outer modules first, because train() also sets the modules inside
  loader_.seek(position_, taken_);
}

/// Where steps are compiled, reshards all units, so that all steps begin in the same state and are the same program.
void Evaluation::end_step() {
  if (world_.traits().traces) reshard_all(*modes_.front().first);
  world_.step_done();
}

std::optional<data::Samples> Evaluation::next() {
  if (const auto done = loader_.position().batch; done > 0) {
    end_step();
    progress_.update(done);
  }
  return loader_.next();
}

}  // namespace tessera::train
