// Stops a process in the middle of a save, at each of its system calls in turn: the checkpoint before is complete, and the run that resumes
// gives the same bits as one that was never stopped. Tests every way to save, and conversions; also system calls that fail or hang.
#include <dlfcn.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <thread>

#include "tessera/base/env.h"
#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/base/process.h"
#include "tessera/checkpoint/async_saver.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/step_folders.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/child_task.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"

namespace {

std::atomic<int64_t> calls_left = -1;  // the number of calls until the process ends; negative for never
std::atomic<int64_t> writes = 0;
std::atomic<bool> renames_folders = true;
std::atomic<bool> fails = false;       // whether the call fails instead of ending the process
thread_local bool hangs_here = false;  // whether this thread hangs in its next call, until `released`
std::atomic<bool> released = true;

/// Counts a system call. Returns whether it shall fail; ends the process if it is the last one.
bool count_call() {
  while (hangs_here && !released) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  if (calls_left <= 0 || --calls_left != 0) return false;
  if (!fails) ::raise(SIGKILL);
  errno = EIO;
  return true;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(::dlsym(RTLD_NEXT, name));
}

}  // namespace

// Replace functions of the C library: Tessera calls these. Each call is a moment at which a save may stop.
extern "C" {
ssize_t write(int file, const void* bytes, size_t count) {
  static auto* const call = real<ssize_t(int, const void*, size_t)>("write");
  if ((hangs_here || ++writes % 6 == 0) && count_call()) return -1;  // counts few of the writes, because a file takes many for its tensors
  return call(file, bytes, count);
}
ssize_t pwrite(int file, const void* bytes, size_t count, off_t offset) {
  static auto* const call = real<ssize_t(int, const void*, size_t, off_t)>("pwrite");
  if (count_call()) return -1;
  return call(file, bytes, count, offset);
}
int fsync(int file) {
  static auto* const call = real<int(int)>("fsync");
  if (count_call()) return -1;
  return call(file);
}
int rename(const char* from, const char* to) noexcept {
  static auto* const call = real<int(const char*, const char*)>("rename");
  if (count_call()) return -1;
  struct stat status{};
  if (!renames_folders && ::stat(from, &status) == 0 && S_ISDIR(status.st_mode)) {
    errno = EXDEV;  // as file systems in front of object stores do
    return -1;
  }
  return call(from, to);
}
int mkdir(const char* path, mode_t mode) noexcept {
  static auto* const call = real<int(const char*, mode_t)>("mkdir");
  if (count_call()) return -1;
  return call(path, mode);
}
}

namespace tessera::testing::stops_test {
namespace {

using checkpoint::latest;
using checkpoint::step_folder;

constexpr int kFirst = 2, kSecond = 4, kEnd = 6;

enum class Way { Blocking, Async, InPlace };

const std::map<std::string, Way> kWays = {{"blocking", Way::Blocking}, {"async", Way::Async}, {"in place", Way::InPlace}};

void save(const PictureRun& run, const std::filesystem::path& prefix, int step, Way way) {
  renames_folders = way != Way::InPlace;
  const checkpoint::Contents contents{.model = run.model.get(), .optimizer = run.optimizer.get(), .notes = {{"step", step}}};
  const checkpoint::SaveOptions options{.keep = checkpoint::Keep{.last = 2}, .in_place = way == Way::InPlace};
  if (way != Way::Async) return checkpoint::save(step_folder(prefix, step), contents, run.world, options);
  checkpoint::AsyncSaver saver(run.world);
  saver.save(step_folder(prefix, step), contents, options);
  run.train(step, step + 1);  // changes all values during the save
  saver.wait();
}

/// Trains, saves twice, and ends the process at a system call of the second save.
int train(const std::filesystem::path& prefix, int64_t calls, Way way) {
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, kFirst);
    save(run, prefix, kFirst, Way::Blocking);
    run.train(kFirst, kSecond);
    world.barrier();
    if (world.is_first()) calls_left = calls;
    world.barrier();
    save(run, prefix, kSecond, way);
    calls_left = -1;
  });
  return 0;
}

std::vector<double> rest_of_run(const std::filesystem::path& prefix, int ranks_own, Way way) {
  std::vector<double> losses;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, 0.25);
    checkpoint::Contents contents{.model = run.model.get(), .optimizer = run.optimizer.get()};
    checkpoint::load(*latest(prefix), contents, world);
    const int step = contents.notes.at("step").as<int>();
    run.train(step, kSecond);
    if (step < kSecond) save(run, prefix, kSecond, way == Way::InPlace ? way : Way::Blocking);  // over what the stopped save has left
    const auto own = run.train(kSecond, kEnd);
    if (world.rank() == ranks_own) losses = own;
  });
  return losses;
}

/// Ends its process at the system call whose number is in TESSERA_TEST_CALLS.
const ChildTask stopped_run("train and stop", [](const std::string& prefix) {
  return train(prefix, std::stoll(env("TESSERA_TEST_CALLS").value()), kWays.at(env("TESSERA_TEST_WAY").value()));
});

/// Returns the exit status of a run that ends at this call, or 0 if the run makes fewer calls.
std::optional<int> run(const std::filesystem::path& prefix, int calls, const std::string& way) {
  Process child({this_program()},
                stopped_run.environment(prefix, {{"TESSERA_TEST_CALLS", std::to_string(calls)}, {"TESSERA_TEST_WAY", way}}));
  return child.wait(std::chrono::seconds(60));
}

class Stops : public ::testing::TestWithParam<std::string> {};

TEST_P(Stops, NeverCostMoreThanTheSaveItself) {
  if (!on_cpu()) GTEST_SKIP() << "it is about files, and starts a process for each system call";
  const auto way = kWays.at(GetParam());
  const Folder whole;
  ASSERT_EQ(run(whole / "run", 0, GetParam()), 0);
  ASSERT_EQ(latest(whole / "run"), step_folder(whole / "run", kSecond));
  const auto expected = rest_of_run(whole / "run", 1, way);
  const int every = env("TESSERA_TEST_EVERY_CALL") ? 1 : 3;
  int stopped = 0, kept = 0;
  for (int calls = 1;; calls += every) {
    const Folder folder;
    const auto status = run(folder / "run", calls, GetParam());
    if (status == 0) break;
    ASSERT_EQ(status, 128 + SIGKILL);
    stopped++;
    const auto newest = latest(folder / "run");
    ASSERT_TRUE(newest);
    kept += newest == step_folder(folder / "run", kSecond);
    EXPECT_TRUE(checkpoint::verify(*newest).faults.empty());
    EXPECT_EQ(rest_of_run(folder / "run", 1, way), expected) << "after a stop at system call " << calls;
  }
  EXPECT_GT(stopped * every, 10);
  EXPECT_GT(kept, 0);  // the last stops are after the new checkpoint has got its name
}

INSTANTIATE_TEST_SUITE_P(, Stops, ::testing::Values("blocking", "async", "in place"), [](const auto& way) {
  return way.param == "in place" ? "InPlace" : way.param == "async" ? "Async" : "Blocking";
});

const std::map<std::string, checkpoint::SaveOptions> kFormats = {
    {"dcp", {.format = checkpoint::Format::Dcp}},
    {"sharded", {.format = checkpoint::Format::Accelerate}},
    {"full", {.format = checkpoint::Format::Accelerate, .accelerate_layout = checkpoint::AccelerateLayout::Full}},
    {"whole.pt", {.format = checkpoint::Format::Torch}},
    {"hub", {.format = checkpoint::Format::Hub, .max_shard_size = 300}},
};

checkpoint::Contents contents_for(const PictureRun& run, const std::string& format) {
  if (format == "hub") return {.model = run.model.get()};
  return {.model = run.model.get(), .optimizer = run.optimizer.get()};
}

/// Saves twice, under one name if the format allows it, and ends the process at a system call of the second save. With 0 calls, the process
/// does not end early, and also saves in Tessera's format.
int save_as(const std::filesystem::path& folder, int64_t calls, const std::string& format) {
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    const checkpoint::Contents contents{.model = run.model.get(), .optimizer = run.optimizer.get()};
    const auto save_once = [&](int step, const std::string& name) {
      if (calls == 0) checkpoint::save(folder / fmt::format("native-{}", step), contents, world);
      checkpoint::save(folder / name, contents_for(run, format), world, kFormats.at(format));
    };
    run.train(0, kFirst);
    save_once(kFirst, format);
    run.train(kFirst, kSecond);
    world.barrier();
    if (world.is_first()) calls_left = calls;
    world.barrier();
    save_once(kSecond, format == "dcp" ? "dcp-2" : format);
    calls_left = -1;
  });
  return 0;
}

const ChildTask stopped_save("save and stop", [](const std::string& folder) {
  return save_as(folder, std::stoll(env("TESSERA_TEST_CALLS").value()), env("TESSERA_TEST_WAY").value());
});

std::optional<int> run_save(const std::filesystem::path& folder, int64_t calls, const std::string& format) {
  Process child({this_program()},
                stopped_save.environment(folder, {{"TESSERA_TEST_CALLS", std::to_string(calls)}, {"TESSERA_TEST_WAY", format}}));
  return child.wait(std::chrono::seconds(60));
}

TEST(StopsOfOtherFormats, LeaveTheOldOrTheNew) {
  if (!on_cpu()) GTEST_SKIP() << "it is about files, and starts a process for each system call";
  const Folder whole;
  ASSERT_EQ(run_save(whole.path(), 0, "dcp"), 0);
  const auto is_of = [&](int step, const std::filesystem::path& path) {
    const auto found = checkpoint::diff(whole / fmt::format("native-{}", step), path).different;
    // Both ranks share one generator here, so its state differs from run to run.
    return std::ranges::all_of(found, [](const auto& each) { return each.name == ".generator.cpu"; });
  };
  for (const auto& [format, options] : kFormats) {
    int stopped = 0;
    for (int64_t calls = 1;; calls += 1 + calls / 2) {  // most of them are writes of values
      const Folder folder;
      const auto status = run_save(folder.path(), calls, format);
      if (status == 0) break;
      ASSERT_EQ(status, 128 + SIGKILL);
      stopped++;
      const auto old = folder / format, next = format == "dcp" ? folder / "dcp-2" : old;
      const bool has_new = std::filesystem::exists(next) && is_of(kSecond, next);
      EXPECT_TRUE(has_new || is_of(kFirst, old)) << format << " after a stop at system call " << calls;
      if (has_new) continue;
      with_ranks(2, [&](const Communicator& world) {  // over what the stopped save has left
        const PictureRun run(world);
        checkpoint::save(next, contents_for(run, format), world, options);
      });
    }
    EXPECT_GT(stopped, 5) << format;
  }
}

TEST(FoldersThatCanNotBeRenamed, AreSavedInPlace) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    renames_folders = false;
    const auto said = message_of<IoError>([&] { checkpoint::save(folder / "a", {.model = run.model.get()}, world); });
    EXPECT_THAT(said, ::testing::HasSubstr("where folders can't be renamed, save with SaveOptions::in_place"));
  });
  renames_folders = true;
  EXPECT_FALSE(std::filesystem::exists(folder / "a"));
}

TEST(FoldersThatCanNotBeRenamed, AreNeverRemovedIfTheyHoldOtherThings) {
  const Folder folder;
  std::filesystem::create_directories(folder / "run/net-step-1");
  write_file(folder / "run/net-step-1/rank-0-of-2.safetensors", "torn");
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    for (const bool in_place : {true, false}) {
      EXPECT_THAT(message_of<IoError>([&] { checkpoint::save(folder / "run", {.model = run.model.get()}, world, {.in_place = in_place}); }),
                  ::testing::HasSubstr("there is a "));
    }
    checkpoint::save(folder / "run/net-step-1", {.model = run.model.get()}, world, {.in_place = true});
  });
  EXPECT_TRUE(checkpoint::is_complete(folder / "run/net-step-1"));
}

/// Converts in a forked process, which is possible because this one has no other threads. Returns whether the conversion made fewer calls.
bool convert_until(int64_t calls, const std::filesystem::path& from, const std::filesystem::path& to,
                   const checkpoint::ConvertOptions& options) {
  const auto child = ::fork();
  if (child == 0) {
    calls_left = calls;
    try {
      checkpoint::convert(from, to, options);
    } catch (...) {
      ::_exit(1);
    }
    ::_exit(calls_left > 0 ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(status == 0 || (fails ? WIFEXITED(status) : WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL)) << status;
  return status == 0;
}

TEST(StopsOfConversions, LeaveNothingOrAll) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, kFirst);
    save(run, folder / "run", kFirst, Way::Blocking);
  });
  const auto from = step_folder(folder / "run", kFirst);
  for (const auto to : {checkpoint::Format::Tessera, checkpoint::Format::Accelerate, checkpoint::Format::Torch}) {
    const checkpoint::ConvertOptions options{.to = to, .world = 2, .settings = {{"lr", 0.05}}};
    int stopped = 0;
    for (int64_t calls = 1;; calls += 1 + calls / 4) {  // most of them are writes of values
      const auto out = folder / fmt::format("{}-{}", static_cast<int>(to), calls);
      if (convert_until(calls, from, out, options)) break;
      stopped++;
      if (!std::filesystem::exists(out)) checkpoint::convert(from, out, options);  // over what the stopped one has left
      EXPECT_TRUE(checkpoint::diff(from, out).different.empty()) << out;
      std::filesystem::remove_all(out);
    }
    EXPECT_GT(stopped, 5);
  }
}

/// Two models in Tessera's format, and comparisons of a path with each of them.
struct TwoModels {
  Folder folder;

  TwoModels() {
    for (const int which : {0, 1}) {
      with_ranks(2, [&](const Communicator& world) {
        const PictureRun run(world, shard_nested, 0.5 + which);
        checkpoint::save(model(which), {.model = run.model.get()}, world);
      });
    }
  }
  std::filesystem::path model(int which) const { return folder / fmt::format("model-{}", which); }
  bool is(int which, const std::filesystem::path& path) const {
    const auto found = checkpoint::diff(model(which), path);
    const auto is_generator = [](const std::string& name) { return name.find("generator") != std::string::npos; };
    return std::ranges::all_of(found.different, [&](const auto& each) { return is_generator(each.name); }) &&
           std::ranges::all_of(found.only_one, is_generator) && std::ranges::all_of(found.only_other, is_generator);
  }
};

constexpr int64_t kSmall = 300, kLarge = 1 << 30;

/// Writes one model over the other, and ends or fails at each system call in turn. `first` and `second` are the sizes of the largest files.
void expect_old_or_new(const TwoModels& two, int64_t first, int64_t second) {
  const auto options = [](int64_t bytes) {
    return checkpoint::ConvertOptions{.to = checkpoint::Format::Hub, .weights_only = true, .max_shard_size = bytes};
  };
  const Folder fresh;
  checkpoint::convert(two.model(1), fresh / "hub", options(second));
  int old = 0, next = 0;
  for (int64_t calls = 1;; calls++) {
    const Folder folder;
    const auto out = folder / "hub";
    checkpoint::convert(two.model(0), out, options(first));
    const bool is_done = convert_until(calls, two.model(1), out, options(second));
    const bool is_old = two.is(0, out), is_new = two.is(1, out);
    EXPECT_TRUE(is_old || is_new) << "at system call " << calls;
    // Hugging Face's programs look for a single file first.
    const auto single = out / "model.safetensors";
    EXPECT_TRUE(!std::filesystem::exists(single) || two.is(0, single) || two.is(1, single));
    (is_old ? old : next)++;
    checkpoint::convert(two.model(1), out, options(second));
    EXPECT_TRUE(two.is(1, out));
    EXPECT_EQ(names_in(out), names_in(fresh / "hub")) << "after system call " << calls;  // no other files stay
    if (is_done) break;
  }
  EXPECT_GT(old, 3);
  EXPECT_GT(next, 0);
}

TEST(StopsOfHubFolders, LeaveTheOldModelOrTheNewOne) {
  const TwoModels two;
  for (const bool is_failure : {false, true}) {
    fails = is_failure;
    expect_old_or_new(two, kSmall, kSmall);
  }
  fails = false;
  expect_old_or_new(two, kSmall, kLarge);
  expect_old_or_new(two, kLarge, kSmall);
}

/// Saves a second model over the first, during which a system call fails. Returns the error messages of the two ranks.
std::array<std::string, 2> fail_at(int64_t calls, const std::filesystem::path& out, const checkpoint::SaveOptions& options) {
  std::array<std::string, 2> said;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun before(world, shard_nested, 0.5), run(world, shard_nested, 1.5);
    if (options.format != checkpoint::Format::Tessera) checkpoint::save(out, {.model = before.model.get()}, world, options);
    world.barrier();
    if (world.is_first()) {
      fails = true;
      calls_left = calls;
    }
    world.barrier();
    try {
      checkpoint::save(out, {.model = run.model.get()}, world, options);
    } catch (const IoError& error) {
      said.at(static_cast<size_t>(world.rank())) = error.what();
    }
    world.barrier();
    if (world.is_first()) fails = false;
  });
  return said;
}

TEST(FailuresOfSaves, SayThatNothingHasChangedOnlyWhereThatIsSo) {
  const TwoModels two;
  constexpr int64_t kNever = 1 << 20;
  const std::map<std::string, checkpoint::SaveOptions> ways = {{"hub", {.format = checkpoint::Format::Hub, .max_shard_size = kSmall}},
                                                               {"whole.pt", {.format = checkpoint::Format::Torch}},
                                                               {"sharded", {.format = checkpoint::Format::Accelerate}},
                                                               {"native", {}}};
  for (const auto& [name, options] : ways) {
    const Folder whole;
    fail_at(kNever, whole / name, options);
    const auto all = kNever - calls_left;
    int failed = 0, changed = 0;
    for (int64_t calls = 1; calls <= all; calls += calls + 12 < all ? 1 + calls / 2 : 1) {  // tries each of the last calls: renames
      const Folder folder;
      const auto out = folder / name;
      const auto said = fail_at(calls, out, options);
      const bool is_new = std::filesystem::exists(out) && two.is(1, out);
      EXPECT_TRUE(is_new || (name == "native" ? !std::filesystem::exists(out) : two.is(0, out))) << name;
      EXPECT_EQ(said[0].empty(), said[1].empty()) << said[0] << said[1];
      failed += said[0].empty() ? 0 : 1;
      if (said[0].empty() || !is_new) continue;
      changed++;
      for (const auto& each : said) {
        EXPECT_THAT(each, ::testing::Not(::testing::AnyOf(::testing::HasSubstr("unchanged"), ::testing::HasSubstr("nothing of this save"))));
      }
    }
    calls_left = -1;
    EXPECT_GT(failed, 5) << name;
    EXPECT_TRUE(changed > 0 || name == "sharded") << name;  // for "sharded", no call can fail after the new folder has its name
  }
}

TEST(RanksThatHangInASave, AreNamedInEveryFormat) {
  const Folder folder;
  released = false;
  std::atomic<size_t> named = 0;
  std::vector<std::thread> formats;
  for (const auto& [name, options] : kFormats) {
    formats.emplace_back([&, name = name, options = options] {
      const auto program = [&](const Communicator& world) {
        const PictureRun run(world);
        hangs_here = world.rank() == 1;
        const auto said = message_of<Error>([&] { checkpoint::save(folder / name, contents_for(run, name), world, options); });
        if (world.rank() != 0) return;  // its file may have been removed, which gives another error
        EXPECT_THAT(said, ::testing::HasSubstr("rank 1")) << name;
        if (++named == kFormats.size()) released = true;
      };
      run_world({.transport = "threads", .ranks = 2}, program, std::chrono::seconds(3));
    });
  }
  for (auto& each : formats) each.join();
}

}  // namespace
}  // namespace tessera::testing::stops_test
