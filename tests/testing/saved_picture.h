// Saving and loading a run of the model in picture.h.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>

#include "tessera/checkpoint/checkpoint.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing {

inline checkpoint::Contents contents(const PictureRun& run, checkpoint::Notes notes = {}) {
  return {.model = run.model.get(), .optimizer = run.optimizer.get(), .notes = std::move(notes)};
}

inline void save(const std::filesystem::path& folder, const PictureRun& run, checkpoint::Notes notes = {}) {
  checkpoint::save(folder, contents(run, std::move(notes)), run.world);
}

inline checkpoint::Notes load(const std::filesystem::path& folder, const PictureRun& run) {
  auto into = contents(run);
  checkpoint::load(folder, into, run.world);
  return into.notes;
}

}  // namespace tessera::testing
