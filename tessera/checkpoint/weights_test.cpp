// Full weights can be loaded into any model of the same shape, however it is sharded.
#include "tessera/checkpoint/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/convert.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tests/testing/allocations.h"
#include "tests/testing/default_device.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/picture.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::weights_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_same_state(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto left = full_state(a), right = full_state(b);
  ASSERT_EQ(left.size(), right.size());
  for (const auto& [name, tensor] : left) EXPECT_TRUE(same_values(tensor, right.at(name))) << name;
}

TEST(Weights, GoIntoPlainAndShardedModels) {
  const Folder folder;
  with_ranks(3, [&](const Communicator& world) {
    PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    if (world.rank() == 0) checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    world.barrier();
    // A model with channels-last and tied weights and buffers. Different initial values on the ranks do not matter.
    const auto plain = std::make_shared<Picture>(0.1);
    checkpoint::load_weights(*plain, folder / "a.safetensors");
    expect_same_state(*plain, *run.model);
    PictureRun other(world, shard_nested, 0.1 * (1 + world.rank()));
    checkpoint::load_weights(*other.model, folder / "a.safetensors");
    expect_same_state(*other.model, *run.model);
    // The shards are as exact as the file, even if the model computes in a narrower dtype.
    const auto narrow = std::make_shared<Picture>(0.1);
    fully_shard(narrow, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    checkpoint::load_weights(*narrow, folder / "a.safetensors");
    expect_same_state(*narrow, *run.model);
  });
}

// Each rank verifies a share of the checksums, and damage is an error on all ranks.
TEST(Weights, ThatAreDamagedChangeNothingOnAnyRank) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    checkpoint::consolidate(folder / "a", folder / "a.safetensors");
  });
  const auto whole = read_file(folder / "a.safetensors");
  const checkpoint::SafetensorsFile file(folder / "a.safetensors");
  for (const auto& name : file.names()) {
    auto damaged = whole;
    damaged[file.offset(name)] = static_cast<char>(damaged[file.offset(name)] ^ 1);
    write_file(folder / "damaged.safetensors", damaged);
    with_ranks(3, [&](const Communicator& world) {
      const PictureRun run(world, shard_nested, 0.25);
      const auto before = full_state(*run.model);
      EXPECT_THAT(message_of<IoError>([&] { checkpoint::load_weights(*run.model, folder / "damaged.safetensors"); }),
                  HasSubstr("the bytes of '" + name + "'"));
      for (const auto& [each, tensor] : full_state(*run.model)) EXPECT_TRUE(at::equal(tensor, before.at(each))) << each;
    });
  }
}

TEST(Weights, InAFormatThatIsNotReadAreRefused) {
  const Folder folder;
  Picture picture;
  for (const auto* text : {"import torchvision\n", ""}) {
    write_file(folder / "pictures.py", text);
    EXPECT_THAT(
        message_of<IoError>([&] { checkpoint::load_weights(picture, folder / "pictures.py"); }),
        HasSubstr(
            "pictures.py is not a checkpoint: it is not a safetensors file (.safetensors), not a file of torch.save (.pth, .pt, .bin)"));
  }
}

TEST(Weights, OfAnotherModelAreRefused) {
  const Folder folder;
  with_ranks(1, [&](const Communicator& world) {
    checkpoint::save(folder / "a", {.model = seeded_net().get()}, world);
    checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    Picture picture;
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load_weights(picture, folder / "a.safetensors"); }),
                AllOf(HasSubstr("is of another model: it has no 'conv.bias'"), HasSubstr("the model has no 'a.bias'")));
    auto wide = seeded_net();
    wide->c = wide->replace_module("c", torch::nn::Linear(10, 5));
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load_weights(*wide, folder / "a.safetensors"); }),
                AllOf(HasSubstr("'c.bias' is Float of [4] there, but Float of [5] in the model"), HasSubstr("'c.weight'")));
  });
}

TEST(Weights, MayHaveOtherNames) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    const PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    if (world.rank() == 0) checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    world.barrier();
    const auto inner = std::make_shared<Picture>(0.1);
    torch::nn::Sequential outer;
    outer->push_back("inner", torch::nn::AnyModule(inner));
    fully_shard(outer, {.mesh = world});
    checkpoint::load_weights(*outer, folder / "a.safetensors", {.renamed = {{"^(.*)$", "outer.$1"}, {"^outer", "inner"}}});
    expect_same_state(*inner, *run.model);
    const auto refusal = [&](const checkpoint::WeightsOptions& options) {
      return message_of<UsageError>([&] { checkpoint::load_weights(*outer, folder / "a.safetensors", options); });
    };
    EXPECT_THAT(refusal({}), HasSubstr("it has no 'inner."));
    EXPECT_THAT(refusal({.renamed = {{"[", ""}}}), HasSubstr("'[' in the option renamed is not a regular expression"));
    EXPECT_THAT(refusal({.renamed = {{"weight$", "bias"}}}), HasSubstr("also the name of another tensor"));
  });
}

/// A language model whose output layer shares the embeddings' weight: registered under both names, or only assigned to the member.
struct Words : torch::nn::Module {
  enum class Tie { Registered, MemberOnly };
  struct Head : torch::nn::LinearImpl {
    Head() : torch::nn::LinearImpl(torch::nn::LinearOptions(4, 7).bias(false)) {}
    void tie(const at::Tensor& other, Tie tie) {
      weight = other;
      if (tie == Tie::Registered) parameters_["weight"] = other;
    }
  };
  torch::nn::Embedding words = register_module("words", torch::nn::Embedding(7, 4));
  std::shared_ptr<Head> head = register_module("head", std::make_shared<Head>());
  explicit Words(Tie tie = Tie::Registered) {
    fill_with_numbers(*this);
    head->tie(words->weight, tie);
  }
};

using State = std::map<std::string, at::Tensor>;

/// Writes files and folders in each format that can hold different tensors under two tied names.
void write_state(const std::filesystem::path& folder, const State& state) {
  std::filesystem::create_directories(folder);
  std::vector<checkpoint::SafetensorsEntry> entries;
  checkpoint::pickle::Dict dict;
  for (const auto& [name, tensor] : state) {
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
    dict.entries.emplace_back(name, checkpoint::pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()});
  }
  checkpoint::SafetensorsWriter safetensors(folder / "state.safetensors", std::move(entries));
  checkpoint::TorchFileWriter torch(folder / "state.pt", std::move(dict));
  for (const auto& [name, tensor] : state) {
    safetensors.write(tensor);
    torch.write(tensor);
  }
  safetensors.close();
  torch.close();
  checkpoint::convert(folder / "state.pt", folder / "dcp", {.to = checkpoint::Format::Dcp, .world = 2});
  checkpoint::convert(folder / "state.pt", folder / "ours", {.to = checkpoint::Format::Tessera, .world = 2});
}

TEST(Weights, ThatContradictATieAreAnErrorOrTheFirst) {
  const Folder folder;
  const auto first = at::arange(28, at::kFloat).view({7, 4});
  auto other = first.clone();
  write_state(folder / "equal", {{"words.weight", first}, {"head.weight", other}});
  other[6][3] += 1;  // the last value, which only one rank has
  write_state(folder / "different", {{"words.weight", first}, {"head.weight", other}});
  for (const int ranks : {1, 3}) {
    with_ranks(ranks, [&](const Communicator& world) {
      for (const bool sharded : {false, true}) {
        for (const auto* name : {"state.safetensors", "state.pt", "dcp", "ours"}) {
          SCOPED_TRACE(std::string(name) + (sharded ? ", sharded" : ", plain"));
          const auto model = std::make_shared<Words>();
          if (sharded) fully_shard(model, {.mesh = world});
          checkpoint::load_weights(*model, folder / "equal" / name);
          const auto before = full_state(*model);
          EXPECT_TRUE(at::equal(before.at("words.weight"), first));
          const auto failure = message_of<Error>([&] { checkpoint::load_weights(*model, folder / "different" / name); });
          EXPECT_THAT(failure, HasSubstr("are one parameter in the model, but differ there (first_of_tied"));
          expect_same_state(*model, *model);
          checkpoint::load_weights(*model, folder / "different" / name, {.first_of_tied = true});
          EXPECT_TRUE(at::equal(full_state(*model).at("head.weight"), first));
          if (!sharded) continue;
          checkpoint::Contents run{.model = model.get()};
          EXPECT_THAT(message_of<Error>([&] { checkpoint::load(folder / "different" / name, run, world); }), HasSubstr("first_of_tied"));
          checkpoint::load(folder / "different" / name, run, world, {.first_of_tied = true});
        }
        const State dict = {{"words.weight", first}, {"head.weight", other}};
        const auto model = std::make_shared<Words>();
        if (sharded) fully_shard(model, {.mesh = world});
        EXPECT_THAT(message_of<Error>([&] { checkpoint::load_full_state_dict(*model, dict); }), HasSubstr("first_of_tied"));
        checkpoint::load_full_state_dict(*model, dict, {.first_of_tied = true});
        EXPECT_TRUE(at::equal(full_state(*model).at("head.weight"), first));
      }
    });
  }
}

// After `head->weight = words->weight`, the name head.weight still refers to its initial values.
TEST(Weights, OfATieThatIsOnlyAMemberAreSavedWithOneWarning) {
  const Folder folder;
  std::vector<std::string> warnings;
  const auto sink = set_log_sink([&](const LogRecord& record) { warnings.emplace_back(record.text); });
  with_ranks(2, [&](const Communicator& world) {
    const auto model = std::make_shared<Words>(Words::Tie::MemberOnly);
    fully_shard(model, {.mesh = world});
    for (const auto* name : {"a", "b"}) checkpoint::save(folder / name, {.model = model.get()}, world);
    const auto tied = std::make_shared<Words>();
    fully_shard(tied, {.mesh = world});
    checkpoint::Contents run{.model = tied.get()};
    EXPECT_THAT(message_of<Error>([&] { checkpoint::load(folder / "a", run, world); }), HasSubstr("'words.weight' and 'head.weight'"));
    checkpoint::load(folder / "a", run, world, {.first_of_tied = true});
    EXPECT_TRUE(at::equal(full_state(*tied).at("head.weight"), full_state(*model).at("words.weight")));
    checkpoint::save(folder / "c", {.model = tied.get()}, world);
    checkpoint::save(folder / "d", {.model = sharded_net(world).get()}, world);
  });
  set_log_sink(sink);
  ASSERT_EQ(warnings.size(), 1U);
  EXPECT_THAT(warnings.front(), AllOf(HasSubstr("'head.weight' is saved with its initial values"), HasSubstr("'words.weight'")));
}

TEST(Weights, AreFoundUnderTheKeysOfOtherPrograms) {
  const Folder folder;
  const auto values = at::arange(28, at::kFloat).view({7, 4});
  for (const std::string before : {"", "module.", "_orig_mod.", "module._orig_mod.", "model.", "model.module.", "state_dict.model.",
                                   "app.model.", "state.model.module.", "net."}) {
    SCOPED_TRACE(before);
    write_state(folder / ("weights-" + before), {{before + "words._orig_mod.weight", values}});
    with_ranks(2, [&](const Communicator& world) {
      for (const auto* name : {"state.safetensors", "state.pt", "dcp"}) {
        const auto model = std::make_shared<Words>();
        fully_shard(model, {.mesh = world});
        checkpoint::load_weights(*model, folder / ("weights-" + before) / name);
        EXPECT_TRUE(at::equal(full_state(*model).at("words.weight"), values));
      }
    });
  }
  // If the model's own names have such prefixes, they are kept, and no stored weights are left out to make the rest fit.
  struct Outer : torch::nn::Module {
    std::shared_ptr<Words> module = register_module("module", std::make_shared<Words>());
  } outer;
  write_state(folder / "own", {{"module.words.weight", values}});
  checkpoint::load_weights(outer, folder / "own/state.pt");
  EXPECT_TRUE(at::equal(outer.module->words->weight, values));
  write_state(folder / "two", {{"net.words.weight", values}, {"net.other", values}, {"second", values}});
  EXPECT_THAT(message_of<UsageError>([&] { checkpoint::load_weights(*outer.module, folder / "two/state.pt"); }), HasSubstr("'net.other'"));
}

// torch::save() writes such files, for example in programs that do not shard yet.
TEST(Weights, ComeFromFilesOfLibtorchItself) {
  const Folder folder;
  const auto source = std::make_shared<Picture>(0.3);
  torch::save(source, (folder / "module.pt").string());
  torch::nn::Sequential list(torch::nn::Linear(2, 3), torch::nn::ReLU(), torch::nn::BatchNorm1d(3));
  torch::save(list, (folder / "list.pt").string());
  c10::Dict<std::string, at::Tensor> dict;
  const auto state = full_state(*source);
  for (const auto& [name, tensor] : state) dict.insert(name, tensor);
  const auto bytes = torch::pickle_save(dict);
  write_file(folder / "dict.pt", {bytes.begin(), bytes.end()});
  c10::impl::GenericDict nested(c10::StringType::get(), c10::AnyType::get());
  nested.insert("model", dict);
  nested.insert("epoch", int64_t{3});
  nested.insert("sizes", std::vector<int64_t>{1, 2});
  const auto more = torch::pickle_save(nested);
  write_file(folder / "nested.pt", {more.begin(), more.end()});
  with_ranks(2, [&](const Communicator& world) {
    for (const auto* name : {"module.pt", "dict.pt", "nested.pt"}) {
      SCOPED_TRACE(name);
      const auto plain = std::make_shared<Picture>(0.1);
      checkpoint::load_weights(*plain, folder / name);
      expect_same_state(*plain, *source);
      const PictureRun run(world, shard_nested, 0.1);
      checkpoint::load_weights(*run.model, folder / name);
      expect_same_state(*run.model, *source);
    }
    torch::nn::Sequential other(torch::nn::Linear(2, 3), torch::nn::ReLU(), torch::nn::BatchNorm1d(3));
    fully_shard(other, {.mesh = world});
    checkpoint::load_weights(*other, folder / "list.pt");
    expect_same_state(*other, *list);
  });
  EXPECT_EQ(checkpoint::read_torch_file(folder / "nested.pt").values.at("epoch"), 3);
  EXPECT_EQ(checkpoint::read_torch_file(folder / "nested.pt").values.at("sizes"), nlohmann::json({1, 2}));
}

TEST(Weights, ComeFromHubFoldersWithPickles) {
  const Folder folder;
  const auto source = std::make_shared<Picture>(0.3);
  with_ranks(1, [&](const Communicator& world) { checkpoint::save(folder / "a", {.model = source.get()}, world); });
  checkpoint::merge(folder / "a", folder / "one", {.unsafe_serialization = true});
  std::filesystem::create_directory(folder / "two");
  std::map<std::string, State> files;
  nlohmann::json index = {{"metadata", {{"total_size", 1}}}};
  const checkpoint::CatalogReader whole(checkpoint::read_catalog(folder / "one"));
  for (const auto& [name, tensor] : whole.catalog().tensors) {
    const auto* const file =
        files["pytorch_model-00001-of-00002.bin"].size() < 3 ? "pytorch_model-00001-of-00002.bin" : "pytorch_model-00002-of-00002.bin";
    files[file][name] = whole.read(name);
    index["weight_map"][name] = file;
  }
  for (const auto& [name, state] : files) {
    write_state(folder / "parts", state);
    std::filesystem::rename(folder / "parts/state.pt", folder / "two" / name);
    std::filesystem::remove_all(folder / "parts");
  }
  write_file(folder / "two/pytorch_model.bin.index.json", index.dump());
  for (const auto* name : {"one", "two"}) {
    EXPECT_EQ(checkpoint::format_of(folder / name), checkpoint::Format::Hub);
    const auto plain = std::make_shared<Picture>(0.1);
    checkpoint::load_weights(*plain, folder / name);
    expect_same_state(*plain, *source);
    checkpoint::merge(folder / name, folder / (std::string(name) + "-merged"));
    checkpoint::load_weights(*plain, folder / (std::string(name) + "-merged"));
    expect_same_state(*plain, *source);
  }
  index["weight_map"]["missing"] = "pytorch_model-00002-of-00002.bin";
  write_file(folder / "two/pytorch_model.bin.index.json", index.dump());
  Picture other;
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::load_weights(other, folder / "two"); }), HasSubstr("has no 'missing'"));
}

std::shared_ptr<Picture> deferred_picture() {
  return deferred_init([] { return std::make_shared<Picture>(0.1); });
}

TEST(Weights, GoIntoModelsWithoutMemory) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    if (world.rank() == 0) checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    world.barrier();
    for (const auto* name : {"a", "a.safetensors"}) {
      const auto plain = deferred_picture();
      checkpoint::load_weights(*plain, folder / name);
      expect_same_state(*plain, *run.model);
      for (const auto start : {Start::Equal, Start::Loaded}) {
        const auto sharded = deferred_picture();
        fully_shard(sharded, {.mesh = world, .start = start, .ignored = {sharded->conv->bias}});
        checkpoint::load_weights(*sharded, folder / name);
        expect_same_state(*sharded, *run.model);
      }
    }
    const auto dict = checkpoint::full_state_dict(*run.model);
    const auto sharded = deferred_picture();
    fully_shard(sharded, {.mesh = world, .start = Start::Loaded});
    checkpoint::load_full_state_dict(*sharded, dict, {.broadcast_from_rank0 = true});
    expect_same_state(*sharded, *run.model);
    const auto model = deferred_picture();
    fully_shard(model, {.mesh = world, .start = Start::Loaded});
    checkpoint::Contents resumed{.model = model.get()};
    checkpoint::load(folder / "a", resumed, world);
    expect_same_state(*model, *run.model);
  });
}

TEST(Weights, ThatNobodyLoadedAreAnError) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    checkpoint::save(folder / "a", {.model = seeded_net().get()}, world);
    auto net = deferred_init([] { return Net(); });
    fully_shard(net, {.mesh = world, .start = Start::Loaded});
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::save(folder / "b", {.model = net.get()}, world); }), HasSubstr("'a.weight'"));
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::full_state_dict(*net); }), HasSubstr("'a.weight'"));
    EXPECT_THAT(message_of<UsageError>([&] { checkpoint::local_state_dict(*net); }), HasSubstr("'a.weight'"));
    auto dict = checkpoint::full_state_dict(*seeded_net());
    dict.erase("b.weight");
    checkpoint::load_full_state_dict(*net, dict, {.may_be_missing = {"b.weight"}});
    EXPECT_THAT(message_of<UsageError>([&] { net->forward(input()); }), HasSubstr("values of 'b.weight', but nobody has loaded"));
  });
}

TEST(Weights, NeedNoMemoryBesidesTheShards) {
  const Folder folder;
  const auto make = [] { return torch::nn::Linear(1024, 1024); };
  with_ranks(2, [&](const Communicator& world) {
    if (world.rank() == 0) {
      const auto whole = make();
      checkpoint::save(folder / "a", {.model = whole.ptr().get()}, self_world());
    }
    world.barrier();
    const Allocations allocations;
    auto model = deferred_init(make, {.seed = 1});
    fully_shard(model, {.mesh = world, .start = Start::Loaded, .residence = Residence::Gathered});
    checkpoint::load_weights(*model, folder / "a");
    const int64_t shards = on_cpu() ? 1 : 2;  // values for a device are read into host memory first
    EXPECT_LT(allocations.peak(), shards * 1024 * 1024 * 4 / 2 + (256 << 10));
  });
}

TEST(Weights, GoIntoAPartOfAUnit) {
  const Folder folder;
  with_ranks(2, [&](const Communicator& world) {
    auto net = seeded_net();
    fully_shard(net, {.mesh = world});
    const auto plain = seeded_net();
    auto part = seeded_net()->b;
    const torch::NoGradGuard no_grad;
    part->weight.mul_(3);
    fully_shard(part, {.mesh = world});
    checkpoint::save(folder / "b", {.model = part.get()}, world);
    checkpoint::load_weights(*net->b, folder / "b");
    EXPECT_TRUE(at::equal(full_parameter(net->b->weight), plain->b->weight * 3));
    EXPECT_TRUE(at::equal(full_parameter(net->a->weight), plain->a->weight));
  });
}

}  // namespace
}  // namespace tessera::testing::weights_test
