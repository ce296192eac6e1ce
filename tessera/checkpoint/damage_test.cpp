// Loading a checkpoint that is damaged or can't be read throws an error that names the file, on all ranks, before anything has changed.
#include <dirent.h>
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <torch/torch.h>

#include <cerrno>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/stored/manifest.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::damage_test {

int fail_readdir_after = -1;  // how many entries of a folder can be read before it fails; -1 for all

}  // namespace tessera::testing::damage_test

/// Replaces the C library's function: Tessera calls this one.
extern "C" dirent* readdir(DIR* folder) {
  using tessera::testing::damage_test::fail_readdir_after;
  static const auto real = reinterpret_cast<dirent* (*)(DIR*)>(::dlsym(RTLD_NEXT, "readdir"));
  if (fail_readdir_after == 0) {
    errno = EIO;
    return nullptr;
  }
  if (fail_readdir_after > 0) fail_readdir_after--;
  return real(folder);
}

namespace tessera::testing::damage_test {
namespace {

using checkpoint::latest;
using checkpoint::step_folder;
using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CheckpointDamage, ThatIsDamagedIsRefusedOnAllRanks) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    save(folder / "a", run);
    const auto file = folder / "a" / "rank-1-of-2.safetensors";
    if (world.rank() == 0) write_file(file, read_file(file).substr(0, 5000));
    world.barrier();
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "a", run); }),
                HasSubstr("rank-1-of-2.safetensors is cut off, or of another save: it has 5000 bytes"));
    world.barrier();
    if (world.rank() == 0)
      std::filesystem::copy_file(folder / "a/rank-0-of-2.safetensors", file, std::filesystem::copy_options::overwrite_existing);
    world.barrier();
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "a", run); }), HasSubstr("is cut off, or of another save"));
    world.barrier();
    if (world.rank() == 0) std::filesystem::remove(folder / "a/manifest.json");
    world.barrier();
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "a", run); }), HasSubstr("it was written by rank 0 of 2"));
    world.barrier();
    if (world.rank() == 0) std::filesystem::remove(file);
    world.barrier();
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "a", run); }), HasSubstr("is incomplete: 'rank-1-of-2.safetensors' is missing"));
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "b", run); }), HasSubstr("there is no checkpoint"));
    EXPECT_THAT(message_of<IoError>([&] { load(folder.path(), run); }), HasSubstr("is not a checkpoint"));
  });
}

/// Rewrites a safetensors file with tensors that `change` has changed, and with new checksums.
void rewrite(const std::filesystem::path& path, const std::function<void(const std::string& name, at::Tensor& tensor)>& change) {
  const checkpoint::SafetensorsFile file(path);
  std::vector<checkpoint::SafetensorsEntry> entries;
  std::vector<at::Tensor> tensors;
  for (const auto& name : file.names()) {
    tensors.push_back(file.read(name));
    change(name, tensors.back());
    entries.push_back({.name = name, .dtype = tensors.back().scalar_type(), .sizes = tensors.back().sizes().vec()});
  }
  checkpoint::SafetensorsWriter writer(path, entries, file.metadata());
  for (const auto& tensor : tensors) writer.write(tensor);
  writer.close();
}

// Loading finds each of these faults before the first value changes.
TEST(CheckpointDamage, ThatIsDamagedInsideChangesNothing) {
  const Folder folder;
  const std::vector<std::pair<std::string, std::function<void(const std::filesystem::path&)>>> damages = {
      {"the bytes of 'conv.",
       [](const auto& file) {
         auto bytes = read_file(file);
         const checkpoint::SafetensorsFile opened(file);
         size_t begin = 0;  // where the data of conv.weight begins, in bytes from the end of the file
         bool found = false;
         for (const auto& name : opened.names()) {
           found |= name.starts_with("conv.");
           if (found) begin += static_cast<size_t>(opened.info(name).bytes());
         }
         bytes[bytes.size() - begin] = static_cast<char>(bytes[bytes.size() - begin] ^ 1);
         write_file(file, bytes);
       }},
      {"disagree about the shape or the dtype of '.generator.cpu'",
       [](const auto& file) {
         std::filesystem::remove(file.parent_path() / "manifest.json");  // which has the checksums of the files
         rewrite(file, [](const std::string& name, at::Tensor& tensor) {
           if (name == ".generator.cpu") tensor = tensor.slice(0, 0, 100).clone();
         });
       }},
      {"state of the random generator in",
       [](const auto& file) {
         std::filesystem::remove(file.parent_path() / "manifest.json");  // which has the checksums of the files
         rewrite(file, [](const std::string& name, at::Tensor& tensor) {
           if (name == ".generator.cpu") tensor.fill_(255);
         });
       }},
  };
  for (size_t i = 0; i < damages.size(); i++) {
    const auto path = folder / std::to_string(i);
    with_ranks(2, [&](const Communicator& world) {
      const PictureRun run(world);
      run.train(0, 2);
      save(path, run);
      if (world.rank() == 1) damages[i].second(path / "rank-1-of-2.safetensors");
      world.barrier();
      run.train(2, 3);
      const auto before = full_state(*run.model);
      const auto message = message_of<IoError>([&] { load(path, run); });
      EXPECT_THAT(message, ::testing::Not(HasSubstr("Exception raised from")));
      if (world.rank() == 1) {
        EXPECT_THAT(message, AllOf(HasSubstr(damages[i].first), HasSubstr("rank-1-of-2.safetensors")));
      }
      expect_same(full_state(*run.model), before);
    });
  }
}

TEST(CheckpointDamage, OfTheManifestIsFound) {
  const Folder folder;
  const auto saved = step_folder(folder / "run", 1);
  with_ranks(2, [&](const Communicator& world) { save(saved, PictureRun(world), {{"step", 17}}); });
  const auto whole = read_file(saved / "manifest.json");
  auto changed = whole;
  changed.replace(changed.find("\"17\""), 4, "\"16\"");
  write_file(saved / "manifest.json", changed);
  with_ranks(2, [&](const Communicator& world) {
    EXPECT_THAT(message_of<IoError>([&] { load(saved, PictureRun(world)); }), HasSubstr("manifest.json can't be used: it is damaged"));
    EXPECT_FALSE(latest(folder / "run", world));
  });
  for (const auto& [text, said] :
       {std::pair{whole.substr(0, 100), "it is not JSON from byte "}, {std::string("{}"), "a value is missing or has the wrong type"}}) {
    write_file(saved / "manifest.json", text);
    EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_manifest(saved); }),
                AllOf(HasSubstr("manifest.json can't be used"), HasSubstr(said)));
  }
  changed = whole;
  changed.replace(changed.find("\"version\": 2"), 12, "\"version\": 9");
  write_file(saved / "manifest.json", changed);
  with_ranks(2, [&](const Communicator& world) {
    const auto said = message_of<UsageError>([&] { latest(folder / "run", world); });
    EXPECT_THAT(said, HasSubstr("is of version 9"));
    EXPECT_THAT(message_of<UsageError>([&] { save(saved, PictureRun(world)); }), HasSubstr("is of version 9"));
  });
  EXPECT_TRUE(std::filesystem::exists(saved / "rank-0-of-2.safetensors"));
}

TEST(CheckpointDamage, InsideOfFilesIsPassedOverIfAskedFor) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const int step : {1, 2}) save(step_folder(folder / "run", step), run);
    world.barrier();
    if (world.is_first()) {
      const auto file = step_folder(folder / "run", 2) / "rank-1-of-2.safetensors";
      auto bytes = read_file(file);
      bytes.back() = static_cast<char>(bytes.back() ^ 1);
      write_file(file, bytes);
    }
    world.barrier();
    EXPECT_EQ(latest(folder / "run", world), step_folder(folder / "run", 2));
    EXPECT_EQ(latest(folder / "run", world, checkpoint::Check::Checksums), step_folder(folder / "run", 1));
  });
}

// If an unreadable folder counted as an empty one, a training run would start again from step 0 although it has checkpoints.
TEST(CheckpointDamage, InAFolderThatCanNotBeReadIsNotMistakenForNone) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) { save(step_folder(folder / "run", 1), PictureRun(world)); });
  std::filesystem::create_symlink("loop", folder / "loop");
  EXPECT_THAT(message_of<IoError>([&] { latest(folder / "loop/run"); }), HasSubstr("can't read the folder"));
  EXPECT_THAT(message_of<IoError>([&] { latest(folder / (std::string(300, 'x') + "/run")); }), HasSubstr("File name too long"));
  write_file(folder / "file", "text");
  EXPECT_THAT(message_of<IoError>([&] { latest(folder / "file/run"); }), HasSubstr("Not a directory"));
  {
    rlimit before{};
    ::getrlimit(RLIMIT_NOFILE, &before);
    const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
    ::setrlimit(RLIMIT_NOFILE, &none);
    const auto message = message_of<IoError>([&] { latest(folder / "run"); });
    const auto complete = message_of<IoError>([&] { checkpoint::is_complete(step_folder(folder / "run", 1)); });
    ::setrlimit(RLIMIT_NOFILE, &before);
    EXPECT_THAT(message, HasSubstr("Too many open files"));
    EXPECT_THAT(complete, HasSubstr("Too many open files"));
  }
  fail_readdir_after = 1;
  const auto message = message_of<IoError>([&] { latest(folder / "run"); });
  fail_readdir_after = -1;
  EXPECT_THAT(message, HasSubstr("Input/output error"));
  EXPECT_EQ(latest(folder / "run"), step_folder(folder / "run", 1));
}

TEST(CheckpointDamage, WithTwoThousandMillionRanksIsIncomplete) {
  const Folder folder;
  write_file(folder / "rank-0-of-2000000000.safetensors", "");
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::saved_ranks(folder.path()); }),
              HasSubstr("'rank-1-of-2000000000.safetensors' and 1999999998 more are missing"));
}

TEST(CheckpointDamage, InTheFileOfARankThatIsNotThereAnyMoreIsRefused) {
  const Folder folder;
  const auto file = folder / "a" / "rank-1-of-2.safetensors";
  with_ranks(2, [&](const Communicator& world) { save(folder / "a", PictureRun(world)); });
  auto bytes = read_file(file);
  bytes[bytes.size() - 5] ^= 1;
  write_file(file, bytes);
  with_ranks(1, [&](const Communicator& world) {
    EXPECT_THAT(message_of<IoError>([&] { load(folder / "a", PictureRun(world)); }), HasSubstr("rank-1-of-2.safetensors"));
  });
}

}  // namespace
}  // namespace tessera::testing::damage_test
