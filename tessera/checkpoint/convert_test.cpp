// Tests of runs that are converted to other formats and other numbers of ranks, and of the differences between two checkpoints.
#include "tessera/checkpoint/convert.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <limits>

#include "tessera/base/error.h"
#include "tessera/base/folder.h"
#include "tessera/checkpoint/diff.h"
#include "tessera/checkpoint/formats/accelerate.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/live/generator_state.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/stored/rank_file.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/optim/sgd.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/saved_picture.h"

namespace tessera::testing::convert_test {
namespace {

using checkpoint::convert;
using checkpoint::ConvertOptions;
using checkpoint::diff;
using checkpoint::Format;
using checkpoint::reshard;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

using State = std::map<std::string, at::Tensor>;

/// The losses of rank 0 in the two steps after a checkpoint, and the model after them.
struct Future {
  std::vector<double> losses;
  State state;
};
Future save_picture(const std::filesystem::path& folder, int ranks) {
  Future future;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world);
    run.train(0, 2);
    save(folder, run, {{"step", 2}, {"scheduler.last_epoch", 2}});
    const auto losses = run.train(2, 4);
    auto state = full_state(*run.model);
    if (world.is_first()) future = {losses, std::move(state)};
  });
  return future;
}

/// Resumes from a checkpoint and returns its future.
Future resume_picture(const std::filesystem::path& folder, int ranks) {
  Future future;
  with_ranks(ranks, [&](const Communicator& world) {
    const PictureRun run(world, shard_nested, 0.25);
    const auto notes = load(folder, run);
    EXPECT_EQ(notes.at("step").as<int>(), 2);
    const auto losses = run.train(2, 4);
    auto state = full_state(*run.model);
    if (world.is_first()) future = {losses, std::move(state)};
  });
  return future;
}

const checkpoint::Notes kRate = {{"lr", 0.05}};

TEST(Reshard, KeepsTheRun) {
  const Folder folder;
  const auto expected = save_picture(folder / "two", 2);
  for (const int ranks : {1, 3, 7}) {
    const auto to = folder / std::to_string(ranks);
    const auto done = reshard(folder / "two", to, ranks);
    auto found = checkpoint::diff(folder / "two", to);
    // The states of device generators are left out for other numbers of ranks.
    std::erase_if(found.only_one, [](const auto& name) {
      return name.starts_with(checkpoint::kGeneratorPrefix) && name != checkpoint::kHiddenGeneratorName;
    });
    EXPECT_TRUE(found.is_none());
    EXPECT_TRUE(checkpoint::verify(to).faults.empty());
    EXPECT_EQ(checkpoint::read_manifest(to).ranks, ranks);
    EXPECT_EQ(done.files, std::vector{to});
  }
  // The buffers and generators of each rank come back, too, so the run resumes with the same bits.
  reshard(folder / "3", folder / "again", 2);
  const auto resumed = resume_picture(folder / "again", 2);
  EXPECT_EQ(resumed.losses, expected.losses);
  expect_same(resumed.state, expected.state);
  // A rank that the checkpoint did not have gets its own generator.
  const auto three = checkpoint::read_manifest(folder / "3");
  const checkpoint::CatalogReader stored(three.catalog);
  const auto generator = [&](int rank) { return checkpoint::read_generator(stored, three, rank)->get_state(); };
  EXPECT_FALSE(at::equal(generator(0), generator(2)));
}

struct Target {
  std::string name;
  ConvertOptions options;
};

TEST(Convert, KeepsTheRunInEveryFormat) {
  const Folder folder;
  save_picture(folder / "native", 1);
  const auto expected = resume_picture(folder / "native", 1);
  const std::vector<Target> targets = {
      {"tessera", {.to = Format::Tessera, .world = 3}},
      {"dcp", {.to = Format::Dcp, .world = 2, .settings = kRate}},
      {"run.pt", {.to = Format::Torch, .settings = kRate}},
      {"sharded", {.to = Format::Accelerate, .world = 2, .settings = kRate}},
      {"full", {.to = Format::Accelerate, .accelerate_layout = checkpoint::AccelerateLayout::Full, .settings = kRate}},
  };
  for (const auto& [name, given] : targets) {
    SCOPED_TRACE(name);
    auto options = given;
    options.memory = 100;  // most tensors are read in pieces
    int64_t last = 0, all = 0;
    options.progress = [&](const std::string&, int64_t bytes, int64_t of) {
      EXPECT_TRUE(bytes >= last && bytes <= of);
      last = bytes;
      all = of;
    };
    const auto done = convert(folder / "native", folder / name, options);
    EXPECT_EQ(done.from, Format::Tessera);
    EXPECT_EQ(all, done.bytes);
    EXPECT_EQ(checkpoint::format_of(folder / name), options.to);
    EXPECT_TRUE(checkpoint::verify(folder / name).faults.empty());
    const auto resumed = resume_picture(folder / name, 1);
    EXPECT_EQ(resumed.losses, expected.losses);
    expect_same(resumed.state, expected.state);
    convert(folder / name, folder / (name + "-back"), {.world = 2});
    EXPECT_TRUE(checkpoint::diff(folder / "native", folder / (name + "-back")).different.empty());
    expect_same(resume_picture(folder / (name + "-back"), 1).state, expected.state);
  }
  const auto kept = checkpoint::read_run(folder / "sharded");
  EXPECT_EQ(kept.notes.front().at("scheduler.last_epoch"), "2");
  EXPECT_EQ(kept.optimizer, "torch::optim::AdamW");
}

TEST(Convert, WritesWeightsAlone) {
  const Folder folder;
  save_picture(folder / "native", 2);
  State state;
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world);
    load(folder / "native", run);
    state = full_state(*run.model);
  });
  const std::vector<Target> targets = {{"hub", {.to = Format::Hub, .max_shard_size = 300}},
                                       {"whole.safetensors", {.to = Format::Safetensors}},
                                       {"model.pt", {.to = Format::Torch, .weights_only = true}},
                                       {"dcp", {.to = Format::Dcp, .weights_only = true}}};
  for (const auto& [name, given] : targets) {
    SCOPED_TRACE(name);
    convert(folder / "native", folder / name, given);
    auto cut = given;
    cut.memory = 30;
    convert(folder / "native", folder / ("cut-" + name), cut);
    EXPECT_TRUE(diff(folder / name, folder / ("cut-" + name)).is_none());
    EXPECT_TRUE(checkpoint::verify(folder / ("cut-" + name)).faults.empty());
    EXPECT_TRUE(checkpoint::read_run(folder / name).optimizer.empty());
    const Picture whole(0.25);
    checkpoint::load_weights(const_cast<Picture&>(whole), folder / name);
    expect_same(full_state(whole), state);
  }
  EXPECT_EQ(read_file(folder / "whole.safetensors"), read_file(folder / "cut-whole.safetensors"));
  EXPECT_EQ(read_file(folder / "model.pt"), read_file(folder / "cut-model.pt"));
}

TEST(Convert, RefusesWhatCanNotBe) {
  const Folder folder;
  save_picture(folder / "native", 2);
  const auto refused = [&](const ConvertOptions& options, const char* out = "out") {
    return message_of<UsageError>([&] { convert(folder / "native", folder / out, options); });
  };
  EXPECT_THAT(refused({}, "native/out"), HasSubstr("lies in the checkpoint"));
  EXPECT_THAT(refused({.to = Format::Dcp}),
              AllOf(HasSubstr("which 'lr' its optimizer (tessera::optim::AdamW) had"), HasSubstr(".settings = {{\"lr\", VALUE}}")));
  EXPECT_THAT(refused({.to = Format::Torch, .settings = {{"lr", 0.1}, {"betaz", 1}}}),
              AllOf(HasSubstr("has no setting 'betaz'; it has"), HasSubstr("betas")));
  EXPECT_THAT(refused({.to = Format::Torch, .settings = {{"lr", "{}"}}}),
              HasSubstr("the setting 'lr' of tessera::optim::AdamW can't be {}; give a number, such as 0.001"));
  EXPECT_THAT(refused({.to = Format::Torch, .settings = {{"lr", 0.1}, {"betas", 0.9}}}),
              HasSubstr("can't be 0.9; give a list, such as [0.9,0.999]"));
  EXPECT_THAT(refused({.from = Format::Dcp}), HasSubstr("is a checkpoint of Tessera, not a folder of torch.distributed"));
  EXPECT_THAT(refused({.world = 0}), HasSubstr("0 ranks"));
  EXPECT_THAT(refused({.memory = 0}), HasSubstr("0 bytes"));
  EXPECT_THAT(refused({.dtype = at::kLong}), HasSubstr("Long"));
  const std::pair<Format, const char*> endings[] = {
      {Format::Safetensors, "y.pt"}, {Format::Safetensors, "x.onnx"}, {Format::Torch, "y.safetensors"}, {Format::Torch, "y.onnx"}};
  for (const auto& [to, name] : endings)
    EXPECT_THAT(refused({.to = to, .settings = kRate}, name), HasSubstr(std::string(name) + " asks for another format")) << name;
  EXPECT_THAT(refused({.to = Format::TorchXla}), HasSubstr("rank files of torch_xla are read, not written"));
  for (const auto to : {Format::Tessera, Format::Dcp, Format::Hub, Format::Accelerate}) {
    for (const auto* name : {"y3.pth", "y.safetensors"}) EXPECT_THAT(refused({.to = to}, name), HasSubstr("is the name of a file")) << name;
  }
  EXPECT_EQ(names_in(folder.path())->size(), 1U);
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  EXPECT_FALSE(std::filesystem::exists(folder / "out.part"));

  std::filesystem::create_directory(folder / "there");
  EXPECT_THAT(message_of<IoError>([&] { reshard(folder / "native", folder / "there", 2); }), HasSubstr("there"));
  convert(folder / "native", folder / "accelerate", {.to = Format::Accelerate, .settings = kRate});
  EXPECT_THAT(message_of<UsageError>([&] { convert(folder / "accelerate", folder / "native", {.to = Format::Hub}); }),
              HasSubstr("native is a checkpoint of Tessera, and a model in it would be deleted with it"));
  EXPECT_THAT(message_of<IoError>([&] { convert(folder / "accelerate/optimizer_0", folder / "out", {.to = Format::Hub}); }),
              HasSubstr("did you mean " + (folder / "accelerate/pytorch_model_fsdp_0").string()));
  EXPECT_THAT(message_of<UsageError>([&] {
                with_ranks(1, [&](const Communicator& world) { load(folder / "accelerate/pytorch_model_fsdp_0", PictureRun(world)); });
              }),
              AllOf(HasSubstr("has no optimizer"), HasSubstr("did you mean " + (folder / "accelerate").string())));
  std::filesystem::create_directory(folder / "around");
  std::filesystem::rename(folder / "accelerate", folder / "around/state");
  EXPECT_THAT(message_of<IoError>([&] { convert(folder / "around", folder / "out", {.to = Format::Hub}); }),
              HasSubstr("did you mean " + (folder / "around/state").string()));
}

TEST(Convert, LeavesNothingIfTheDiskIsFull) {
  const Folder folder;
  save_picture(folder / "native", 2);
  const FullDisk disk(500);
  for (const auto to : {Format::Tessera, Format::Dcp, Format::Accelerate, Format::Torch, Format::Safetensors}) {
    EXPECT_THROW(convert(folder / "native", folder / "out", {.to = to, .settings = kRate}), IoError);
    EXPECT_FALSE(std::filesystem::exists(folder / "out"));
    EXPECT_FALSE(std::filesystem::exists(folder / "out.part"));
  }
}

TEST(Convert, KeepsStateOfEightBitsInItsOwnFormat) {
  if (!on_cpu()) GTEST_SKIP() << "AdamW8bit works in host memory";
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    optim::AdamW8bit optimizer(parameters(*net), {.lr = 0.1});
    net->forward(input(world.rank())).sum().backward();
    optimizer.step();
    checkpoint::save(folder / "small", {.model = net.ptr().get(), .optimizer = &optimizer, .notes = {{"rank", world.rank()}}}, world);
  });
  EXPECT_THAT(message_of<UsageError>([&] { convert(folder / "small", folder / "out", {.to = Format::Dcp}); }),
              HasSubstr("convert the weights only"));
  convert(folder / "small", folder / "weights", {.weights_only = true});
  EXPECT_FALSE(diff(folder / "small", folder / "weights").is_none());
}

TEST(Convert, DoesNotChooseAmongTheNotesOfRanks) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    checkpoint::save(folder / "two", {.model = net.ptr().get(), .notes = {{"rank", world.rank()}}}, world);
  });
  EXPECT_THAT(message_of<UsageError>([&] { reshard(folder / "two", folder / "three", 3); }), HasSubstr("different notes 'rank'"));
  convert(folder / "two", folder / "three", {.world = 3, .notes_of_first_rank = true});
  reshard(folder / "two", folder / "same", 2);
  EXPECT_EQ(checkpoint::read_manifest(folder / "same").notes.at(1).at("rank"), "1");
  EXPECT_EQ(checkpoint::read_manifest(folder / "three").notes.at(1).at("rank"), "0");
}

/// Tests optimizers that PyTorch has under other names.
TEST(Optimizers, GoOnAsThoseOfTorch) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = sharded_net(world);
    const auto step = [&](auto& model, auto& optimizer, int shift) {
      model->forward(input(shift)).pow(2).mean().backward();
      optimizer.step();
      optimizer.zero_grad();
    };
    optim::SGD momentum(parameters(*net), {.lr = 0.1, .momentum = 0.9});
    step(net, momentum, 0);
    step(net, momentum, 1);
    checkpoint::save(folder / "own", {.model = net.ptr().get(), .optimizer = &momentum}, world);
    if (world.is_first()) convert(folder / "own", folder / "dcp", {.to = Format::Dcp, .settings = {{"lr", 0.1}, {"momentum", 0.9}}});
    world.barrier();
    step(net, momentum, 2);
    const auto expected = full_state(*net);
    for (const auto* from : {"own", "dcp"}) {
      auto other = sharded_net(world);
      torch::optim::SGD theirs(parameters(*other), torch::optim::SGDOptions(0.1).momentum(0.9));
      checkpoint::Contents contents{.model = other.ptr().get(), .optimizer = &theirs};
      checkpoint::load(folder / from, contents, world);
      step(other, theirs, 2);
      for (const auto& [name, tensor] : full_state(*other)) EXPECT_TRUE(at::allclose(tensor, expected.at(name), 1e-5, 1e-7)) << name;
      auto third = sharded_net(world);
      optim::SGD ours(parameters(*third), {.lr = 0.1, .momentum = 0.9});
      contents = {.model = third.ptr().get(), .optimizer = &ours};
      checkpoint::load(folder / from, contents, world);
      step(third, ours, 2);
      expect_same(full_state(*third), expected);
      optim::AdamW adam(parameters(*third), {.lr = 0.1});
      contents.optimizer = &adam;
      EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load(folder / from, contents, world); }),
                  HasSubstr("optim::SGD, but is loaded"));
    }
  });
}

void write_torch(const std::filesystem::path& path, const State& state) {
  checkpoint::pickle::Dict dict;
  for (const auto& [key, tensor] : state) {
    dict.entries.emplace_back(key, checkpoint::pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  }
  checkpoint::TorchFileWriter writer(path, std::move(dict));
  for (const auto& [key, tensor] : state) writer.write(tensor);
  writer.close();
}

TEST(Convert, MakesNoValueInfinite) {
  const Folder folder;
  const auto infinite = std::numeric_limits<float>::infinity();
  for (const auto& [dtype, most] : {std::pair(at::kHalf, 1e5F), {at::kBFloat16, 3.4e38F}}) {
    for (const float value : {most, -most}) {
      write_torch(folder / "in.pt", {{"large", at::tensor({1.0F, value, infinite})}});
      for (const auto to : {Format::Hub, Format::Torch, Format::Tessera}) {
        const auto out = folder / fmt::format("{}-{}-{}", c10::toString(dtype), value, static_cast<int>(to));
        EXPECT_THAT(message_of<UsageError>([&] { convert(folder / "in.pt", out, {.to = to, .dtype = dtype}); }),
                    AllOf(HasSubstr("'large' has values up to "), HasSubstr(std::string(c10::toString(dtype)) + " can't hold")));
      }
    }
    write_torch(folder / "in.pt", {{"infinite", at::tensor({1.0F, infinite})}});
    convert(folder / "in.pt", folder / (std::string("fits-") + c10::toString(dtype)), {.to = Format::Hub, .dtype = dtype});
  }
}

TEST(Convert, TakesEveryShapeAndDtype) {
  const Folder folder;
  State state = {{"empty", at::ones({0, 4})}, {"scalar", at::ones({})}, {"one", at::ones({1, 1})}, {"deep", at::rand({2, 3, 1, 5})}};
  for (const auto dtype : {at::kDouble, at::kHalf, at::kBFloat16, at::kLong, at::kByte, at::kBool, at::kFloat8_e5m2}) {
    state[c10::toString(dtype)] = at::arange(6).view({3, 2}).to(dtype);
  }
  write_torch(folder / "in.pt", state);
  for (const auto to : {Format::Tessera, Format::Dcp, Format::Accelerate, Format::Torch, Format::Safetensors, Format::Hub}) {
    for (const int world : {1, 4}) {
      const auto out = folder / fmt::format("{}-{}", static_cast<int>(to), world);
      convert(folder / "in.pt", out, {.to = to, .world = world, .memory = 8});
      EXPECT_EQ(checkpoint::to_table(diff(folder / "in.pt", out)), "11 tensors are equal, 0 are not\n") << out;
      EXPECT_TRUE(checkpoint::verify(out).faults.empty());
    }
  }
  convert(folder / "in.pt", folder / "half", {.to = Format::Dcp, .dtype = at::kHalf});
  EXPECT_EQ(checkpoint::read_catalog(folder / "half").tensors.at("model.Double").dtype, at::kHalf);
  EXPECT_EQ(checkpoint::read_catalog(folder / "half").tensors.at("model.Long").dtype, at::kLong);
}

TEST(Diff, TellsWhatDiffers) {
  const Folder folder;
  const auto write = [&](const char* name, const State& state) { write_torch(folder / name, state); };
  const auto nan = std::numeric_limits<double>::quiet_NaN();
  const auto shared = torch::tensor({1.0, nan, 3.0}, at::kDouble);
  write("a.pt", {{"same", shared},
                 {"near", torch::tensor({1.0, 2.0, 4.0}, at::kDouble)},
                 {"kind", at::ones({2})},
                 {"shape", at::ones({2})},
                 {"large", at::full({1}, (int64_t{1} << 60) + 1, at::kLong)},
                 {"complex", at::ones({1}, at::kComplexFloat)},
                 {"lost", at::ones({1})},
                 {"a", at::ones({1})}});
  write("b.pt", {{"same", shared},
                 {"near", torch::tensor({1.0, 2.5, nan}, at::kDouble)},
                 {"kind", at::ones({2}, at::kHalf)},
                 {"shape", at::ones({2, 1})},
                 {"large", at::full({1}, int64_t{1} << 60, at::kLong)},
                 {"complex", at::full({1}, c10::complex<float>(1, 1), at::kComplexFloat)},
                 {"lost", at::full({1}, std::numeric_limits<float>::infinity())},
                 {"b", at::ones({1})}});
  for (const int64_t memory : {int64_t{1}, int64_t{1} << 30}) {
    const auto found = diff(folder / "a.pt", folder / "b.pt", {.memory = memory});
    EXPECT_EQ(found.equal, 1);
    EXPECT_EQ(found.only_one, std::vector<std::string>{"a"});
    EXPECT_EQ(found.only_other, std::vector<std::string>{"b"});
    const auto json = nlohmann::ordered_json::parse(checkpoint::to_json(found))["different"];
    EXPECT_EQ(json.size(), 6U);
    EXPECT_EQ(json["near"]["values"], 2);
    EXPECT_EQ(found.different.size(), 6U);
    EXPECT_EQ(json["kind"], nlohmann::ordered_json(
                                {{"one", "Float [2]"}, {"other", "Half [2]"}, {"values", 0}, {"largest", 0.0}, {"largest_relative", 0.0}}));
    EXPECT_EQ(json["shape"]["values"], 0);
    EXPECT_EQ(json["large"]["values"], 1);
    EXPECT_EQ(json["complex"]["largest"], 1.0);
    for (const auto& tensor : found.different) {
      EXPECT_EQ(std::isinf(tensor.largest), tensor.name == "near" || tensor.name == "lost") << tensor.name;
    }
    EXPECT_THAT(checkpoint::to_table(found),
                AllOf(HasSubstr("only in the first: a\n"), HasSubstr("Float [2] / Half [2]"), HasSubstr("1 tensor is equal, 8 are not")));
  }
  EXPECT_TRUE(diff(folder / "a.pt", folder / "a.pt").is_none());
  write("c.pt", {{"near", torch::tensor({1.0, 2.5}, at::kDouble)}});
  write("d.pt", {{"near", torch::tensor({1.0, 2.0}, at::kDouble)}});
  const auto close = diff(folder / "c.pt", folder / "d.pt").different.at(0);
  EXPECT_EQ(close.largest, 0.5);
  EXPECT_EQ(close.largest_relative, 0.2);
}

TEST(Verify, IsCheapIfAsked) {
  const Folder folder;
  save_picture(folder / "a", 2);
  auto bytes = read_file(folder / "a/rank-1-of-2.safetensors");
  bytes.back() = static_cast<char>(bytes.back() ^ 1);
  write_file(folder / "a/rank-1-of-2.safetensors", bytes);
  EXPECT_TRUE(checkpoint::verify(folder / "a", {.cheap = true}).faults.empty());
  EXPECT_EQ(checkpoint::verify(folder / "a").faults.size(), 1U);
  bytes[20] = static_cast<char>(bytes[20] ^ 1);
  write_file(folder / "a/rank-1-of-2.safetensors", bytes);
  EXPECT_EQ(checkpoint::verify(folder / "a", {.cheap = true}).faults.size(), 1U);
}

}  // namespace
}  // namespace tessera::testing::convert_test
