// Tests of weights in every format that Tessera reads: loaded into sharded models, and merged into files for other programs.
#include "tessera/checkpoint/merge.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>
#include <unistd.h>

#include "tessera/base/atomic_write.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::merge_test {
namespace {

using checkpoint::Format;
using checkpoint::merge;
using ::testing::AllOf;
using ::testing::HasSubstr;

using State = std::map<std::string, at::Tensor>;

/// Saves a checkpoint of two ranks with an optimizer. Returns the values of the model.
State save_run(const std::filesystem::path& folder) {
  State state;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 2);
    save(folder, run, {{"step", 2}});
    if (auto full = full_state(*run.model); world.rank() == 0) state = std::move(full);
  });
  return state;
}

/// Writes a model as a file of torch.save: {"model": ..., "step": 2}.
void write_torch(const std::filesystem::path& path, const State& state) {
  checkpoint::pickle::Dict model;
  for (const auto& [name, tensor] : state)
    model.entries.emplace_back(name, checkpoint::pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  checkpoint::TorchFileWriter writer(path, checkpoint::pickle::Dict{{{"model", std::move(model)}, {"step", int64_t{2}}}});
  for (const auto& [name, tensor] : state) writer.write(tensor);
  writer.close();
}

/// Writes a model as a folder of torch.distributed.checkpoint, each tensor in two parts.
void write_dcp(const std::filesystem::path& folder, const State& state) {
  std::filesystem::create_directories(folder);
  std::vector<checkpoint::DcpItem> items;
  for (const int rank : {0, 1}) {
    checkpoint::DcpRankWriter writer(folder, rank);
    for (const auto& [name, tensor] : state) {
      auto box = whole_slice(tensor.sizes());
      if (tensor.dim() > 0) {
        const auto first = tensor.size(0) / 2;
        box.offsets[0] = rank * first;
        box.sizes[0] = rank == 0 ? first : tensor.size(0) - first;
      } else if (rank == 1) {
        continue;
      }
      writer.write({"model", name}, box, view_of(tensor, box).contiguous());
    }
    for (auto& item : writer.close()) items.push_back(std::move(item));
  }
  checkpoint::write_dcp_metadata(folder, items);
}

TEST(Weights, AreLoadedFromEveryFormat) {
  const Folder folder;
  const auto state = save_run(folder / "native");
  checkpoint::consolidate(folder / "native", folder / "whole.safetensors");
  merge(folder / "native", folder / "hub", {.max_shard_size = 200});
  merge(folder / "native", folder / "bin", {.unsafe_serialization = true});
  auto without_tied = state;
  without_tied.erase("tied");
  write_torch(folder / "model.pth", without_tied);
  write_dcp(folder / "dcp", without_tied);
  const std::vector<std::pair<const char*, Format>> sources = {{"native", Format::Tessera},  {"whole.safetensors", Format::Safetensors},
                                                               {"hub", Format::Hub},         {"bin/pytorch_model.bin", Format::Torch},
                                                               {"model.pth", Format::Torch}, {"dcp", Format::Dcp}};
  for (const auto& [name, format] : sources) {
    SCOPED_TRACE(name);
    EXPECT_EQ(checkpoint::format_of(folder / name), format);
    with_ranks(3, [&, name = std::string(name)](const Communicator& world) {
      PictureRun run(world, shard_nested, 0.25);
      checkpoint::load_weights(*run.model, folder / name);
      expect_same(full_state(*run.model), state);
    });
    const Picture whole(0.25);
    checkpoint::load_weights(const_cast<Picture&>(whole), folder / name);
    expect_same(full_state(whole), state);
  }
}

TEST(Merge, MakesFilesOfLimitedSizeAndAnIndex) {
  const Folder folder;
  const auto state = save_run(folder / "a");
  int64_t last = 0, calls = 0;
  const auto merged =
      merge(folder / "a", folder / "out", {.max_shard_size = 300, .progress = [&](const std::string&, int64_t bytes, int64_t all) {
                                             EXPECT_LE(bytes, all);
                                             last = bytes;
                                             calls++;
                                           }});
  EXPECT_EQ(last, merged.bytes);
  EXPECT_EQ(calls, merged.tensors);
  ASSERT_GT(merged.files.size(), 2U);
  for (const auto& file : merged.files) {
    EXPECT_TRUE(std::filesystem::exists(file));
    const checkpoint::SafetensorsFile opened(file);
    int64_t bytes = 0;
    for (const auto& name : opened.names()) bytes += opened.info(name).bytes();
    EXPECT_TRUE(bytes <= 300 || opened.names().size() == 1);
  }
  const checkpoint::CatalogReader reader(checkpoint::read_hub_folder(folder / "out"));
  EXPECT_TRUE(same_values(reader.read("conv.weight"), state.at("conv.weight")));
  // Writing a smaller model to the same folder removes all files of this one.
  merge(folder / "a", folder / "out", {.dtype = at::kBFloat16});
  EXPECT_FALSE(std::filesystem::exists(merged.files.front()));
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors.index.json"));
  const checkpoint::CatalogReader narrow(checkpoint::read_hub_folder(folder / "out"));
  EXPECT_TRUE(same_values(narrow.read("conv.weight"), state.at("conv.weight").to(at::kBFloat16)));
  EXPECT_EQ(narrow.info("norm.num_batches_tracked").dtype, at::kLong);
}

TEST(Merge, RemovesTheCheckpointOnlyIfAsked) {
  const Folder folder;
  save_run(folder / "a");
  merge(folder / "a", folder / "one");
  EXPECT_TRUE(std::filesystem::exists(folder / "a"));
  merge(folder / "a", folder / "two", {.remove_checkpoint_dir = true});
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
  EXPECT_TRUE(std::filesystem::exists(folder / "two/model.safetensors"));
}

TEST(Merge, LeavesNoLinkToWhatItRemoves) {
  const Folder folder;
  save_run(folder / "z-step-000001");
  save_run(folder / "z-step-000002");
  ASSERT_EQ(std::filesystem::read_symlink(folder / "z-latest"), "z-step-000002");
  merge(folder / "z-latest", folder / "one", {.remove_checkpoint_dir = true});
  EXPECT_FALSE(std::filesystem::exists(folder / "z-step-000002"));
  EXPECT_EQ(std::filesystem::read_symlink(folder / "z-latest"), "z-step-000001");
  merge(folder / "z-latest", folder / "two", {.remove_checkpoint_dir = true});
  EXPECT_FALSE(std::filesystem::is_symlink(folder / "z-latest"));
  save_run(folder / "run");
  std::filesystem::create_directory_symlink("run", folder / "mine");
  merge(folder / "mine", folder / "three", {.remove_checkpoint_dir = true});
  EXPECT_EQ(names_in(folder.path()).value(), (std::vector<std::string>{"one", "three", "two"}));
}

TEST(Merge, RemovesNoFilesOfOthers) {
  const Folder folder;
  save_run(folder / "a");
  merge(folder / "a", folder / "hub", {.max_shard_size = 300});
  checkpoint::convert(folder / "a", folder / "accelerate", {.to = Format::Accelerate, .world = 2, .settings = {{"lr", 0.1}}});
  for (const auto* name : {"a", "hub", "accelerate"}) {
    for (const bool unsafe : {false, true}) {
      write_file(folder / name / "notes.txt", "mine");
      EXPECT_THAT(message_of<UsageError>(
                      [&] { merge(folder / name, folder / "out", {.unsafe_serialization = unsafe, .remove_checkpoint_dir = true}); }),
                  AllOf(HasSubstr("notes.txt is not part of the checkpoint"), HasSubstr("Nothing was written")));
      EXPECT_FALSE(std::filesystem::exists(folder / "out"));
    }
    std::filesystem::remove(folder / name / "notes.txt");
    merge(folder / name, folder / "out", {.remove_checkpoint_dir = true});
    EXPECT_FALSE(std::filesystem::exists(folder / name));
    std::filesystem::remove_all(folder / "out");
  }
}

TEST(Merge, RefusesWhatItCanNotDo) {
  const Folder folder;
  save_run(folder / "run/a");
  EXPECT_THAT(message_of<UsageError>([&] { merge(folder / "run/a", folder / "run/a/out"); }), HasSubstr("lies in the checkpoint"));
  EXPECT_THAT(message_of<UsageError>([&] { merge(folder / "run/a", folder / "out", {.dtype = at::kLong}); }), HasSubstr("Long"));
  EXPECT_THAT(message_of<UsageError>([&] { merge(folder / "run/a", folder / "out", {.max_shard_size = 0}); }),
              HasSubstr("at most 0 bytes"));
  EXPECT_THAT(message_of<IoError>([&] { merge(folder / "none", folder / "out"); }), HasSubstr("there is no"));
  EXPECT_THAT(message_of<IoError>([&] { merge(folder / "run", folder / "out"); }),
              AllOf(HasSubstr("is not a checkpoint"), HasSubstr("did you mean " + (folder / "run/a").string())));
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model.safetensors"));
}

TEST(HubFolder, RefusesFilesOfDifferentModels) {
  const Folder folder;
  save_run(folder / "a");
  const auto merged = merge(folder / "a", folder / "out", {.max_shard_size = 300});
  const auto index = read_file(folder / "out/model.safetensors.index.json");
  const auto refused = [&](const std::string& from, const std::string& to) {
    auto text = index;
    text.replace(text.find(from), from.size(), to);
    write_file(folder / "out/model.safetensors.index.json", text);
    return message_of<IoError>([&] { checkpoint::read_hub_folder(folder / "out"); });
  };
  EXPECT_THAT(refused("\"conv.bias\"", "\"conv.scale\""), HasSubstr("'conv.bias', which the index says is nowhere"));
  EXPECT_THAT(refused("weight_map", "weights"), HasSubstr("can't be used: it is damaged: a value is missing or has the wrong type"));
  EXPECT_THAT(refused("\"weight_map\"", "weight_map"), HasSubstr("can't be used: it is damaged: it is not JSON from byte "));
  EXPECT_THAT(refused("\"model-00001-of", "\"../model-00001-of"), HasSubstr("not in this folder"));
  write_file(folder / "out/model.safetensors.index.json", index);
  std::filesystem::remove(merged.files.back());
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_hub_folder(folder / "out"); }), HasSubstr("can't open"));
}

TEST(Merge, LeavesFilesOfOthersAlone) {
  const Folder folder;
  save_run(folder / "a");
  std::filesystem::create_directories(folder / "out");
  write_file(folder / "out/model-ema.safetensors", "mine");
  write_file(folder / "out/model-00001-of-00009.safetensors", "of another model");
  checkpoint::merge(folder / "a", folder / "out");
  EXPECT_EQ(read_file(folder / "out/model-ema.safetensors"), "mine");
  EXPECT_FALSE(std::filesystem::exists(folder / "out/model-00001-of-00009.safetensors"));
  const auto said = message_of<UsageError>([&] { checkpoint::merge(folder / "a", folder / "out", {.unsafe_serialization = true}); });
  EXPECT_THAT(said, HasSubstr("has a model in safetensors already"));
}

TEST(HubFolder, OfManyFilesIsWrittenWithFewOpenOnes) {
  const Folder folder;
  std::vector<checkpoint::SafetensorsEntry> entries;
  for (int i = 0; i < 100; i++) entries.push_back({.name = fmt::format("w{}", i), .dtype = at::kFloat, .sizes = {2}});
  const auto values = at::tensor({1.0F, 2.0F});
  const auto count_open = [] { return std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {}); };
  const auto before = count_open();
  checkpoint::HubWriter one(folder / "one", entries, {}, 8);
  for (int i = 0; i < 100; i++) {
    one.write(values);
    EXPECT_LT(count_open(), before + 5);
  }
  one.close();
  checkpoint::HubWriter reserved(folder / "reserved", entries, {}, 8);
  for (const auto& bytes : reserved.reserve()) {
    UnfinishedFile file(bytes.file);
    file.write(bytes.offset, {static_cast<const std::byte*>(values.const_data_ptr()), values.nbytes()});
    file.close();
    EXPECT_LT(count_open(), before + 5);
  }
  reserved.close(
      std::vector(100, checkpoint::Checksum::text(checkpoint::checksum_value({static_cast<const char*>(values.const_data_ptr()), 8}))));
  for (const auto* name : {"one", "reserved"}) {
    const checkpoint::CatalogReader reader(checkpoint::read_hub_folder(folder / name));
    EXPECT_TRUE(at::equal(reader.read("w99"), values));
    EXPECT_EQ(names_in(folder / name)->size(), 102U);  // with the index, and the lock of the writer
  }
  EXPECT_EQ(read_file(folder / "one/model-00100-of-00100.safetensors"), read_file(folder / "reserved/model-00100-of-00100.safetensors"));
}

TEST(HubFolder, BelongsToOneJobAtATime) {
  const Folder folder;
  save_run(folder / "a");
  merge(folder / "a", folder / "out", {.max_shard_size = 300});
  const auto before = names_in(folder / "out");
  {
    const checkpoint::HubWriter other(folder / "out", {{.name = "w", .sizes = {2}}}, {}, 1 << 20);
    EXPECT_THAT(message_of<IoError>([&] { merge(folder / "a", folder / "out", {.max_shard_size = 300}); }),
                AllOf(HasSubstr("another job is writing"), HasSubstr("process " + std::to_string(::getpid()))));
  }
  EXPECT_EQ(names_in(folder / "out"), before);
}

TEST(Inspect, ListsWhatIsThere) {
  const Folder folder;
  const auto state = save_run(folder / "a");
  const auto inspected = checkpoint::inspect(folder / "a");
  const auto found = nlohmann::json::parse(inspected);
  EXPECT_EQ(found["ranks"], 2);
  EXPECT_EQ(found["notes"]["step"], "2");
  EXPECT_EQ(found["tensors"]["conv.weight"]["shape"], nlohmann::json(state.at("conv.weight").sizes().vec()));
  EXPECT_EQ(found["tensors"]["conv.weight"]["dtype"], "Float");
  EXPECT_THAT(checkpoint::to_table(inspected),
              AllOf(HasSubstr("a checkpoint of Tessera of 2 ranks"), HasSubstr("optimizer: tessera::optim::AdamW"), HasSubstr("step: 2"),
                    HasSubstr("conv.weight"), HasSubstr("[5, 3, 3, 3]"), HasSubstr("in 2 files")));
}

}  // namespace
}  // namespace tessera::testing::merge_test
