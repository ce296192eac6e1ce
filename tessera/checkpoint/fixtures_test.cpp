// Reads checkpoints that earlier releases have written. tests/fixtures has one for each release that has changed the files, and its
// conversions to other formats by that release. All values in them follow from formulas without rounding, so they are the same on every
// machine.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <array>

#include "tessera/base/env.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::fixtures_test {
namespace {

using checkpoint::Format;

constexpr auto kNewest = "checkpoint-0.3", kNewestFormats = "formats-0.3";

/// A model with weights of several dtypes, a tied one, a frozen one and a buffer, and with sizes that two ranks can't divide evenly.
struct Fixture : torch::nn::Module {
  torch::nn::Linear layer = register_module("layer", torch::nn::Linear(3, 5));
  at::Tensor tied = register_parameter("tied", layer->weight);
  at::Tensor frozen = register_parameter("frozen", at::arange(7, at::kBFloat16), false);
  at::Tensor one = register_parameter("one", at::full({}, 0.5, at::kDouble));
  at::Tensor counts = register_buffer("counts", at::arange(4, at::kLong));

  explicit Fixture(bool filled) {
    const torch::NoGradGuard no_grad;
    layer->weight.copy_(at::arange(15).view({5, 3}));
    layer->bias.copy_(at::arange(5).div(4));
    if (filled) return;
    for (auto& parameter : parameters()) parameter.zero_();
    counts.zero_();
  }
};

/// A run after one step with gradients that are all 2.
struct FixtureRun {
  std::shared_ptr<Fixture> model;
  std::unique_ptr<optim::SGD> optimizer;

  FixtureRun(const Communicator& world, bool filled) : model(std::make_shared<Fixture>(filled)) {
    fully_shard(model, {.mesh = world});
    std::vector<at::Tensor> trained;
    for (const auto& parameter : parameters(*model)) {
      if (parameter.requires_grad()) trained.push_back(parameter);
    }
    optimizer = std::make_unique<optim::SGD>(trained, optim::SgdOptions{.lr = 0.25, .momentum = 0.5});
    if (filled) step();
  }

  void step() const {
    ((model->layer->weight.sum() + model->layer->bias.sum()).to(at::kDouble) + model->one).mul(2).backward();
    optimizer->step();
    optimizer->zero_grad();
  }

  checkpoint::Contents contents() const {
    return {.model = model.get(), .optimizer = optimizer.get(), .notes = {{"step", 1}, {"text", "größe"}}};
  }
};

std::filesystem::path fixture(const std::string& name) {
  return std::filesystem::path(TESSERA_ROOT "/tests/fixtures") / name;
}

void expect_loads(const std::filesystem::path& folder, int ranks) {
  with_ranks(ranks, [&](const Communicator& world) {
    const FixtureRun expected(world, true), found(world, false);
    auto contents = found.contents();
    contents.notes = {};
    checkpoint::load(folder, contents, world, {.notes_of_first_rank = true});
    expect_same(full_state(*found.model), full_state(*expected.model));
    EXPECT_EQ(contents.notes.at("step").as<int>(), 1);
    if (contents.notes.contains("text")) {  // Accelerate's folders can't hold it
      EXPECT_EQ(contents.notes.at("text").text(), "größe");
    }
    found.step();
    expected.step();  // shows whether the momenta are the same, too
    expect_same(full_state(*found.model), full_state(*expected.model));
  });
}

void expect_loads_weights(const std::filesystem::path& path, int ranks) {
  with_ranks(ranks, [&](const Communicator& world) {
    const FixtureRun expected(world, true), found(world, false);
    checkpoint::load_weights(*found.model, path);
    expect_same(full_state(*found.model), full_state(*expected.model));
  });
}

/// The folders of the other formats, and whether they hold the optimizer.
struct OtherFormat {
  const char* name;
  Format format;
  bool is_run;
};
constexpr std::array kOtherFormats = {OtherFormat{"dcp", Format::Dcp, true}, OtherFormat{"run.pt", Format::Torch, true},
                                      OtherFormat{"accelerate", Format::Accelerate, true}, OtherFormat{"hub", Format::Hub, false},
                                      OtherFormat{"xla", Format::TorchXla, false}};

void write_newest() {
  const auto native = fixture(kNewest), others = fixture(kNewestFormats);
  std::filesystem::remove_all(native);
  for (const auto& [name, format, is_run] : kOtherFormats) std::filesystem::remove_all(others / name);
  with_ranks(2, [&](const Communicator& world) { checkpoint::save(native, FixtureRun(world, true).contents(), world); });
  std::filesystem::create_directories(others);
  for (const auto& [name, format, is_run] : kOtherFormats) {
    if (format == Format::TorchXla) continue;  // Tessera does not write this format any more
    checkpoint::ConvertOptions how{.to = format};
    if (format == Format::Dcp) how.world = 2;
    if (format == Format::Hub) how.max_shard_size = 100;  // two files and an index
    if (is_run) how.settings = {{"lr", 0.25}, {"momentum", 0.5}};
    checkpoint::convert(native, others / name, how);
  }
}

TEST(Fixtures, OfAllReleasesAreRead) {
  if (env("TESSERA_TEST_WRITE_PAGES")) write_newest();
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixture(""))) {
    if (!entry.path().filename().string().starts_with("checkpoint-")) continue;
    SCOPED_TRACE(entry.path());
    EXPECT_TRUE(checkpoint::verify(entry.path()).faults.empty());
    for (const int ranks : {1, 2, 3}) expect_loads(entry.path(), ranks);
    found++;
  }
  EXPECT_GT(found, 0);
}

TEST(Fixtures, OfOtherFormatsAreRead) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator(fixture(""))) {
    if (!entry.path().filename().string().starts_with("formats-")) continue;
    for (const auto& [name, format, is_run] : kOtherFormats) {
      const auto path = entry.path() / name;
      SCOPED_TRACE(path);
      EXPECT_EQ(checkpoint::format_of(path), format);
      EXPECT_TRUE(checkpoint::verify(path).faults.empty());
      for (const int ranks : {1, 2}) is_run ? expect_loads(path, ranks) : expect_loads_weights(path, ranks);
    }
    found++;
  }
  EXPECT_GT(found, 0);
}

TEST(Fixtures, AreReadWithoutTheirManifests) {
  const Folder folder;
  std::filesystem::copy(fixture(kNewest), folder / "a");
  std::filesystem::remove(folder / "a/manifest.json");
  for (const int ranks : {1, 2}) expect_loads(folder / "a", ranks);
}

}  // namespace
}  // namespace tessera::testing::fixtures_test
