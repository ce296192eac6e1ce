// Rank files of torch_xla's FSDP: those that Python makes by torch_xla's rules, as tests/python/torch_xla_rules.py states them, and damaged
// ones.
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/consolidate.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/inspect.h"
#include "tessera/checkpoint/merge.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/verify.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_sharded.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"
#include "tests/testing/saved_picture.h"
#include "tests/testing/torch_xla_files.h"

namespace tessera::testing::torch_xla_test {
namespace {

using checkpoint::CatalogReader;
using checkpoint::Format;
using checkpoint::from_json;
using checkpoint::read_torch_xla;
namespace pickle = checkpoint::pickle;
using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

using State = std::map<std::string, at::Tensor>;

constexpr const char* kWays[] = {"plain", "nested", "flat", "nested_flat", "rows"};

void run_python(const std::string& verb, const std::filesystem::path& folder) {
  const auto script = std::filesystem::path(TESSERA_ROOT "/tests/python/torch_files.py").parent_path() / "torch_xla_rules.py";
  const auto [status, output] = run_program({TESSERA_TEST_PYTHON, script, verb, folder});
  if (status == kNoPackage) GTEST_SKIP() << output;
  ASSERT_EQ(status, 0) << output;
}

State state_of(checkpoint::Catalog catalog) {
  const CatalogReader reader(std::move(catalog));
  for (const auto& bytes : reader.catalog().checksums) reader.verify(bytes);
  State state;
  for (const auto& [name, tensor] : reader.catalog().tensors) state[name] = reader.read(name);
  return state;
}

/// A full_state() without the name of a tied parameter that no file of torch_xla has.
State without_tied(State state) {
  state.erase("head.weight");  // "tied" comes first
  return state;
}

struct TorchXlaOfTheirs : ::testing::Test {
  static const Folder& shared() {
    static const Folder folder;
    return folder;
  }
  const Folder& folder = shared();
  // Here rather than in SetUpTestSuite, where a skip would skip no test.
  void SetUp() override {
    if (!std::filesystem::exists(folder / "plain_expected.pth")) run_python("write", folder.path());
  }
  State expected(const std::string& way) const { return state_of(checkpoint::read_torch_file(folder / (way + "_expected.pth"))); }
};

TEST_F(TorchXlaOfTheirs, AreReadInEveryWayOfWrapping) {
  for (const std::string way : kWays) {
    const auto state = expected(way);
    for (const int ranks : {1, 2, 3}) {
      SCOPED_TRACE(way + std::to_string(ranks));
      const auto prefix = folder / (way + std::to_string(ranks));
      EXPECT_EQ(checkpoint::format_of(prefix), Format::TorchXla);
      const auto model = checkpoint::read_model(prefix);
      EXPECT_THAT(model.buffers, ElementsAre("norm.num_batches_tracked", "norm.running_mean", "norm.running_var"));
      expect_same(state_of(model), state);
      EXPECT_TRUE(checkpoint::verify(prefix).faults.empty());

      const auto done = checkpoint::consolidate(prefix, prefix.string() + "_consolidated.pth");
      EXPECT_EQ(done.parameters, 5 * 27 + 5 + 5 + 5 + 25 + 5 + 15 + 3);
      auto whole = state;
      for (auto& [name, tensor] : state_of(checkpoint::read_torch_file(prefix.string() + "_consolidated.pth"))) {
        ASSERT_TRUE(name.starts_with("model.")) << name;
        EXPECT_TRUE(at::equal(tensor, whole.at(name.substr(6)))) << name;
        whole.erase(name.substr(6));
      }
      EXPECT_TRUE(whole.empty());
      // A consolidated file of an earlier run is not one of the ranks' files.
      EXPECT_EQ(read_torch_xla(prefix.string() + "*.pth").files.size(), static_cast<size_t>(ranks));
      EXPECT_EQ(checkpoint::format_of(prefix.string() + "_consolidated.pth"), Format::Torch);
    }
  }
}

TEST_F(TorchXlaOfTheirs, AreLoadedOnAnyNumberOfRanks) {
  for (const std::string way : {"nested", "nested_flat", "rows"}) {
    const auto state = expected(way);
    for (const int ranks : {1, 2, 3}) {
      with_ranks(ranks, [&](const Communicator& world) {
        PictureRun run(world, shard_nested, 0.25);
        checkpoint::load_weights(*run.model, folder / (way + "2_rank-00000001-of-00000002.pth"));
        expect_same(without_tied(full_state(*run.model)), state);
      });
    }
  }
}

TEST_F(TorchXlaOfTheirs, HaveTheStateOfTheOptimizer) {
  for (const std::string way : kWays) {
    SCOPED_TRACE(way);
    const auto catalog = read_torch_xla(folder / (way + "3"));
    EXPECT_EQ(catalog.values.at("epoch"), 7);
    EXPECT_EQ(catalog.values.at("optimizer.param_groups.0.lr"), 0.125);
    auto all = state_of(catalog);
    for (const auto& [name, tensor] : expected(way)) {
      if (catalog.buffers.contains(name)) continue;
      const bool trains = !name.starts_with("frozen");
      ASSERT_EQ(all.contains("optimizer." + name + ".exp_avg"), trains) << name;
      if (!trains) continue;
      EXPECT_TRUE(at::equal(all.at("optimizer." + name + ".exp_avg"), tensor * 0.5)) << name;
      EXPECT_TRUE(at::equal(all.at("optimizer." + name + ".exp_avg_sq"), tensor * 0.25)) << name;
      EXPECT_EQ(all.at("optimizer." + name + ".step").item<float>(), 3) << name;
    }
    EXPECT_EQ(nlohmann::json::parse(checkpoint::inspect(folder / (way + "3")))["ranks"], 3);
  }
}

pickle::Value tree_of(const at::Tensor& tensor) {
  return pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

constexpr auto kName = "_fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module_FSDP_SHARD_SEPARATOR_w";

/// The file of one rank with a part of a parameter "w" of the size [3].
struct WrittenFile {
  at::Tensor part = at::ones({2});
  json metadata = {{"shard_info", {{"", {{kName, {{"_orig_size", {3}}, {"_orig_name", "_fsdp_wrapped_module.w"}}}}}}},
                   {"flatten_info", json::object()},
                   {"buffer_info", json::object()},
                   {"world_size", 2},
                   {"rank", 0}};

  void write(const std::filesystem::path& path) const {
    pickle::Dict all{{{"model", pickle::Dict{{{kName, tree_of(part)}}}}, {"shard_metadata", from_json(metadata)}}};
    if (metadata.is_null()) all.entries.pop_back();
    checkpoint::TorchFileWriter writer(path, all);
    writer.write(part);
    writer.close();
  }
};

TEST(TorchXlaDamage, IsNamed) {
  const Folder folder;
  const auto zero = torch_xla_file(folder / "a", 0, 2), one = torch_xla_file(folder / "a", 1, 2);
  const auto refused = [&](const WrittenFile& first, const WrittenFile& second) {
    first.write(zero);
    second.write(one);
    return message_of<IoError>([&] { checkpoint::read_model(folder / "a"); });
  };
  const auto changed = [](const std::function<void(WrittenFile&)>& change, int rank = 0) {
    WrittenFile file;
    file.metadata["rank"] = rank;
    change(file);
    return file;
  };
  const auto info = [](WrittenFile& file) -> json& { return file.metadata["shard_info"][""][kName]; };
  const auto good = changed([](auto&) {}), second = changed([](auto&) {}, 1);
  good.write(zero);
  second.write(one);
  EXPECT_TRUE(same_values(CatalogReader(checkpoint::read_model(folder / "a")).read("w"), at::ones({3})));

  EXPECT_THAT(refused(good, changed([](auto& file) { file.metadata["rank"] = 0; })), AllOf(HasSubstr(one.string()), HasSubstr("renamed")));
  EXPECT_THAT(refused(good, changed([](auto& file) { file.metadata["world_size"] = 3; }, 1)), HasSubstr("written by rank 1 of 3"));
  EXPECT_THAT(refused(good, changed([](auto& file) { file.metadata = json(); })), HasSubstr("has no 'shard_metadata'"));
  EXPECT_THAT(refused(changed([&](auto& file) { info(file)["_orig_size"] = {5}; }), second), HasSubstr("only 4 of 5"));
  EXPECT_THAT(refused(changed([&](auto& file) { info(file)["_orig_size"] = {-5}; }), second), HasSubstr("does not say name and size"));
  EXPECT_THAT(refused(changed([&](auto& file) { info(file)["_orig_size"] = {int64_t{1} << 62}; }), second), HasSubstr("name and size"));
  EXPECT_THAT(refused(changed([&](auto& file) { info(file)["_orig_name"] = "v"; }), second), HasSubstr("is said to be 'v'"));
  EXPECT_THAT(refused(changed([](auto& file) { file.metadata["shard_info"] = json::object(); }), second), HasSubstr("does not know"));
  EXPECT_THAT(refused(changed([](auto& file) { file.metadata.erase("shard_info"); }), second), HasSubstr("no dict 'shard_info'"));
  EXPECT_THAT(refused(changed([](auto& file) { file.metadata["shard_info"]["x"] = file.metadata["shard_info"][""]; }), second),
              HasSubstr("has no tensor 'x."));
  EXPECT_THAT(refused(good, changed([](auto& file) { file.part = at::ones({2, 1}); }, 1)), HasSubstr("has a part [2, 1] of 'w'"));
  EXPECT_THAT(refused(good, changed([](auto& file) { file.part = at::ones({2}, at::kHalf); }, 1)), HasSubstr("has a part [2] of 'w'"));
  EXPECT_THAT(refused(good, changed([](auto& file) { file.part = at::ones({}); }, 1)), HasSubstr("has a part [] of 'w'"));
  EXPECT_THAT(refused(changed([](auto& file) { file.metadata["rank"] = -1; }), second), HasSubstr("without a 'rank'"));

  good.write(zero);
  std::filesystem::remove(one);
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_model(folder / "a"); }), HasSubstr("the file of rank 1 is missing"));
  std::filesystem::copy_file(zero, folder / "free.pth");
  EXPECT_EQ(checkpoint::format_of(folder / "free.pth"), Format::TorchXla);
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_model(folder / "free.pth"); }), HasSubstr("or a pattern with *"));
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_model(folder / "*.pth"); }), HasSubstr("are both of rank 0"));
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_model(folder / "b"); }), HasSubstr("there is no"));
  second.write(one);
  write_file(one, read_file(one).substr(0, 200));
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_model(folder / "a"); }), HasSubstr(one.string()));
}

TEST(TorchXlaDamage, OfFlatParametersIsNamed) {
  const Folder folder;
  const auto path = torch_xla_file(folder / "a", 0, 1);
  const std::string name = "_fsdp_shard_FSDP_SHARD_SEPARATOR__fsdp_wrapped_module_FSDP_SHARD_SEPARATOR_flat_param_0";
  const std::string flat = "_fsdp_wrapped_module.flat_param_0";
  const auto message = [&](const json& parts) {
    const json metadata = {{"shard_info", {{"", {{name, {{"_orig_size", {3}}, {"_orig_name", flat}}}}}}},
                           {"flatten_info", parts.is_null() ? json::object() : json{{flat, parts}}},
                           {"world_size", 1},
                           {"rank", 0}};
    checkpoint::TorchFileWriter writer(
        path, pickle::Dict{{{"model", pickle::Dict{{{name, tree_of(at::ones({128}))}}}}, {"shard_metadata", from_json(metadata)}}});
    writer.write(at::arange(128, at::kFloat));
    writer.close();
    return message_of<IoError>([&] { checkpoint::read_model(path); });
  };
  for (const auto& wrong :
       {json(), json(3), json({{"w"}, {{3}}}), json({{"w"}, {{3}}, {2}}), json({{"w"}, {{2}}, {2}}), json({{"w"}, {{3}, {1}}, {3}}),
        json({{"w"}, {{-3}}, {3}}), json({{"w"}, {{4}}, {4}}), json({{"w", "v"}, {{3}, {int64_t{1} << 61, 8}}, {3, 0}}),
        json({json::array(), json::array(), json::array()}), json({{1}, {{3}}, {3}})}) {
    EXPECT_THAT(message(wrong), HasSubstr("has a flatten_info that does not fit '" + flat + "'")) << wrong;
  }
  EXPECT_THAT(message({{"w", "w"}, {{1}, {2}}, {1, 2}}), HasSubstr("has two tensors that are 'w'"));
}

}  // namespace
}  // namespace tessera::testing::torch_xla_test
