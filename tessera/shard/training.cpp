#include "tessera/shard/training.h"

#include <torch/nn/module.h>

#include <algorithm>

#include "tessera/shard/access/gradients.h"
#include "tessera/shard/access/write_guard.h"
#include "tessera/shard/forward_phase.h"
#include "tessera/shard/schedule/schedule.h"
#include "tessera/shard/unit/unit.h"
#include "tessera/shard/unit/units.h"

namespace tessera {

namespace {

void skip_units(std::vector<std::shared_ptr<Unit>> skipped) {
  const auto has_no_gradient = [](const std::shared_ptr<Unit>& unit) {
    return std::ranges::none_of(parameters_of(*unit), [](const auto& parameter) { return parameter.shard.grad().defined(); });
  };
  expect_idle("skip_step");
  for (const auto& unit : skipped) expect_synced(*unit);
  std::erase_if(skipped, has_no_gradient);
  // Not committed: torch::optim may still write parameters of these units, so the version is published at this rank's next read, as after a
  // step of torch::optim.
  const WriteGuard guard(skipped, WriteKind::Skip);
}

}  // namespace

void skip_step(ModuleRef module) {
  skip_units(units(module));
}

void skip_step(std::span<const at::Tensor> parameters) {
  std::vector<std::shared_ptr<Unit>> all;
  for (const auto& parameter : parameters) {
    auto unit = locate(parameter).unit;
    if (unit && std::ranges::find(all, unit) == all.end()) all.push_back(std::move(unit));
  }
  skip_units(std::move(all));
}

void set_requires_grad(ModuleRef module, Training training) {
  const bool trained = training == Training::Trained;
  for (const auto& entry : module->parameters()) {
    const auto found = locate(entry);
    if (found.parameter == nullptr) {
      auto own = entry;
      own.set_requires_grad(trained);
      continue;
    }
    const auto lock = found.unit->schedule()->lock();
    found.parameter->shard.set_requires_grad(trained);
  }
}

}  // namespace tessera
