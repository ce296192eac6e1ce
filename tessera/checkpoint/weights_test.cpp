// Full weights can be loaded into any model of the same shape, however it is sharded.
#include "tessera/checkpoint/weights.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/state_dict.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/deferred_init.h"
#include "tessera/shard/full_params.h"
#include "tessera/testing/allocations.h"
#include "tessera/testing/folder.h"
#include "tessera/testing/net.h"
#include "tessera/testing/picture.h"

namespace tessera::testing::weights_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

void expect_same_state(const torch::nn::Module& a, const torch::nn::Module& b) {
  const auto left = full_state(a), right = full_state(b);
  ASSERT_EQ(left.size(), right.size());
  for (const auto& [name, tensor] : left) EXPECT_TRUE(at::equal(tensor, right.at(name))) << name;
}

TEST(Weights, GoIntoPlainAndShardedModels) {
  const Folder folder;
  with_ranks(3, [&](const Communicator& world) {
    PictureRun run(world);
    checkpoint::save(folder / "a", {.model = run.model.get()}, world);
    if (world.rank() == 0) checkpoint::consolidate(folder / "a", folder / "a.safetensors");
    world.barrier();
    // Channels-last, tied, with buffers; and the ranks' own beginnings do not matter.
    const auto plain = std::make_shared<Picture>(0.1);
    checkpoint::load_weights(*plain, folder / "a.safetensors");
    expect_same_state(*plain, *run.model);
    PictureRun other(world, shard_nested, 0.1 * (1 + world.rank()));
    checkpoint::load_weights(*other.model, folder / "a.safetensors");
    expect_same_state(*other.model, *run.model);
    // The shards stay as exact as the file, also where the model computes in a narrower dtype.
    const auto narrow = std::make_shared<Picture>(0.1);
    fully_shard(narrow, {.mesh = world, .mixed_precision = {.param_dtype = at::kBFloat16}});
    checkpoint::load_weights(*narrow, folder / "a.safetensors");
    expect_same_state(*narrow, *run.model);
  });
}

// Each rank looks at a share of the checksums, and all hear of it.
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
    EXPECT_THAT(refusal({.renamed = {{"[", ""}}}), HasSubstr("'[' in the option renamed is no regular expression"));
    EXPECT_THAT(refusal({.renamed = {{"weight$", "bias"}}}), HasSubstr("and of another tensor"));
  });
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
    EXPECT_LT(allocations.peak(), 1024 * 1024 * 4 / 2 + (256 << 10));
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
