// Loading files of two saves in one folder, or files in which a bit has changed, is an error in every format.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::mixed_saves_test {
namespace {

namespace fs = std::filesystem;
using checkpoint::AccelerateLayout;
using checkpoint::Format;
using checkpoint::SaveOptions;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

struct Kind {
  const char* name;
  SaveOptions options;
  bool weights_only = false;
};

const std::vector<Kind> kKinds = {
    {.name = "native", .options = {}},
    {.name = "dcp", .options = {.format = Format::Dcp}},
    {.name = "sharded", .options = {.format = Format::Accelerate}},
    {.name = "full", .options = {.format = Format::Accelerate, .accelerate_layout = AccelerateLayout::Full}},
    {.name = "replicated", .options = {.format = Format::Accelerate, .accelerate_layout = AccelerateLayout::Replicated}},
    {.name = "hub", .options = {.format = Format::Hub, .max_shard_size = 300}, .weights_only = true},
};

void save_as(const Kind& kind, const fs::path& folder, const PictureRun& run, int64_t step) {
  auto all =
      kind.weights_only ? checkpoint::Contents{.model = run.model.get()} : contents(run, {{"step", step}, {"scheduler.last_epoch", step}});
  checkpoint::save(folder, all, run.world, kind.options);
}

/// Returns all values that are read from a checkpoint, each rank's own included.
std::map<std::string, std::string> content_of(const fs::path& path) {
  const auto run = checkpoint::read_run(path);
  if (!run.catalog.faults.empty()) throw IoError(run.catalog.faults.front());
  const checkpoint::CatalogReader stored(run.catalog);
  for (const auto& bytes : run.catalog.checksums) stored.verify(bytes);
  std::map<std::string, std::string> content = {{"optimizer", run.optimizer}};
  for (const auto& [name, tensor] : run.catalog.tensors) {
    stored.expect_complete(name);
    for (const auto& box : tensor.boxes) {
      const auto values = at::empty(box.box.sizes, at::TensorOptions(at::kCPU).dtype(tensor.dtype));
      stored.read(name, box.box, values, box.file);
      content[name].append(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
    }
  }
  for (const auto& notes : run.notes) {
    for (const auto& [name, text] : notes) content["note " + name] += text;
  }
  return content;
}

std::vector<fs::path> files_in(const fs::path& folder) {
  std::vector<fs::path> files;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    if (entry.is_regular_file()) files.push_back(entry.path().lexically_relative(folder));
  }
  std::ranges::sort(files);
  return files;
}

void copy_over(const fs::path& from, const fs::path& to) {
  fs::copy(from, to, fs::copy_options::recursive | fs::copy_options::overwrite_existing);
}

/// A save of each kind after one step, and another after two.
class TwoSaves : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder_ = std::make_unique<Folder>();
    with_ranks(2, [&](const Communicator& world) {
      const PictureRun run(world);
      for (const int64_t step : {1, 2}) {
        run.train(static_cast<int>(step) - 1, static_cast<int>(step));
        for (const auto& kind : kKinds) save_as(kind, of(kind.name, step), run, step);
      }
    });
  }
  static void TearDownTestSuite() { folder_.reset(); }

  static fs::path of(const std::string& kind, int64_t step) { return *folder_ / fmt::format("{}-{}", kind, step); }

  /// Returns a copy of the first save in which `part` is replaced by that of the second.
  static fs::path mixed(const std::string& kind, const fs::path& part) {
    const auto path = *folder_ / "mixed";
    fs::remove_all(path);
    copy_over(of(kind, 1), path);
    copy_over(of(kind, 2) / part, path / part);
    return path;
  }

  static inline std::unique_ptr<Folder> folder_;
};

TEST_F(TwoSaves, AreNeverMixed) {
  for (const auto& kind : kKinds) {
    int64_t different = 0;
    for (const auto& file : files_in(of(kind.name, 1))) {
      if (read_file(of(kind.name, 1) / file) == read_file(of(kind.name, 2) / file)) continue;
      different++;
      EXPECT_THAT(message_of<IoError>([&] { content_of(mixed(kind.name, file)); }), Not(IsEmpty())) << kind.name << " " << file;
    }
    EXPECT_GT(different, 1) << kind.name;
  }
  for (const auto* folder : {"pytorch_model_fsdp_0", "optimizer_0"})
    EXPECT_THAT(message_of<IoError>([&] { content_of(mixed("sharded", folder)); }), HasSubstr("come from different saves")) << folder;
}

TEST_F(TwoSaves, OfWhichOneSaysNothingAreReadAsTheirOwnersReadThem) {
  const auto without = [&](const fs::path& file, const std::string& name, const std::string& other) {
    auto bytes = read_file(file);
    size_t found = 0;
    for (size_t place = 0; (place = bytes.find(name, place)) != std::string::npos; found++) bytes.replace(place, name.size(), other);
    EXPECT_GT(found, 0U) << file;
    write_file(file, bytes);
  };
  const auto full = mixed("full", "optimizer.bin");
  without(full / "optimizer.bin", checkpoint::kSaveKey, "written_here");
  auto content = content_of(full);
  EXPECT_EQ(content.at("conv.weight"), content_of(of("full", 1)).at("conv.weight"));
  EXPECT_EQ(content.at("optimizer.conv.weight.exp_avg"), content_of(of("full", 2)).at("optimizer.conv.weight.exp_avg"));
  const auto dcp = mixed("dcp", "__0_0.distcp");
  EXPECT_THAT(message_of<IoError>([&] { content_of(dcp); }), HasSubstr("__0_0.distcp at byte 0, where 'model."));
  without(dcp / ".metadata", "tessera", "another");
  EXPECT_NE(content_of(dcp), content_of(of("dcp", 1)));
  const auto hub = mixed("hub", "model-00002-of-00003.safetensors");
  {
    const auto file = hub / "model-00002-of-00003.safetensors";
    const checkpoint::SafetensorsFile of_ours(file);
    std::vector<checkpoint::SafetensorsEntry> entries;
    for (const auto& name : of_ours.names()) entries.push_back(of_ours.info(name));
    checkpoint::SafetensorsWriter writer(file, entries, {{"format", "pt"}});
    for (const auto& entry : entries) writer.write(of_ours.read(entry.name));
    writer.close();
  }
  EXPECT_NE(content_of(hub), content_of(of("hub", 1)));
}

TEST_F(TwoSaves, SayWhatIsDamaged) {
  for (const auto& kind : kKinds) {
    const auto expected = content_of(of(kind.name, 1));
    int64_t refused = 0;
    for (const auto& file : files_in(of(kind.name, 1))) {
      const auto path = *folder_ / "damaged";
      fs::remove_all(path);
      copy_over(of(kind.name, 1), path);
      const auto whole = read_file(path / file);
      const size_t flips = file.filename() == ".metadata" ? 80 : 16;
      for (size_t i = 0; i < flips; i++) {
        auto bytes = whole;
        const auto place = i * whole.size() / flips;
        bytes[place] = static_cast<char>(bytes[place] ^ (1 << i % 8));
        write_file(path / file, bytes);
        try {
          EXPECT_TRUE(content_of(path) == expected) << kind.name << " " << file << " at " << place;
        } catch (const IoError&) {
          refused++;
        }
      }
    }
    EXPECT_GT(refused, 16) << kind.name;
  }
}

TEST_F(TwoSaves, OfAcceleratesHaveAChecksumForEachGenerator) {
  const auto path = mixed("sharded", "");
  copy_over(of("sharded", 1), path);
  const auto file = path / "random_states_1.pkl";
  auto bytes = read_file(file);
  {
    const InputFile opened(file);
    const checkpoint::TorchArchive archive(opened, 0, opened.size(), checkpoint::any_globals, file.string());
    const auto* const state = archive.content().as<checkpoint::pickle::Dict>()->find(checkpoint::accelerate::kTorchGenerator);
    bytes[archive.tensor(*state, "state")->begin + 1000] ^= 1;
  }
  EXPECT_THAT(checkpoint::verify(path).faults, IsEmpty());
  write_file(file, bytes);
  EXPECT_THAT(checkpoint::verify(path).faults, ::testing::ElementsAre(HasSubstr("random_states_1.pkl is damaged")));
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 1);
    const auto before = full_state(*run.model);
    EXPECT_THAT(message_of<IoError>([&] { load(path, run); }), HasSubstr("random_states_1.pkl is damaged"));
    expect_same(full_state(*run.model), before);
  });
}

TEST_F(TwoSaves, OfAcceleratesGiveTheirWeightsBesideADamagedScheduler) {
  const auto path = mixed("full", "");
  copy_over(of("full", 1), path);
  auto bytes = read_file(path / "scheduler.bin");
  const auto place = bytes.find("last_epoch");
  ASSERT_NE(place, std::string::npos);
  bytes[place] ^= 1;
  write_file(path / "scheduler.bin", bytes);
  EXPECT_THAT(checkpoint::verify(path).faults, ::testing::ElementsAre(HasSubstr("scheduler.bin is damaged")));
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, /*scale=*/2);
    EXPECT_THAT(message_of<IoError>([&] { load(path, run); }), HasSubstr("scheduler.bin is damaged"));
    checkpoint::load_weights(*run.model, path);
    const PictureRun whole(world);
    load(of("full", 1), whole);
    expect_same(full_state(*run.model), full_state(*whole.model));
  });
}

}  // namespace
}  // namespace tessera::testing::mixed_saves_test
