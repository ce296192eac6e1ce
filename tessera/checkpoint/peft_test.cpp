// Adapters of Python's PEFT have the same outputs, gradients and merged weights here, sharded or not, and are written as they were read.
#include "tessera/checkpoint/peft.h"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <algorithm>

#include "tessera/base/error.h"
#include "tessera/checkpoint/checkpoint.h"
#include "tessera/checkpoint/formats/hub.h"
#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tessera/checkpoint/weights.h"
#include "tessera/comm/self/self.h"
#include "tessera/shard/full_params.h"
#include "tessera/shard/fully_shard.h"
#include "tessera/shard/parameters.h"
#include "tessera/shard/wrap.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::peft_test {
namespace {

using namespace checkpoint;  // NOLINT(google-build-using-namespace)
namespace nn = torch::nn;

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Lt;
using ::testing::SizeIs;

struct NetImpl : nn::Module {
  nn::Embedding embed = register_module("embed", nn::Embedding(20, 12));
  nn::Linear a = register_module("a", nn::Linear(12, 16)),
             b = register_module("b", nn::Linear(nn::LinearOptions(16, 12).bias(false)));
  nn::Conv2d conv = register_module("conv", nn::Conv2d(nn::Conv2dOptions(1, 4, 3).padding(1)));
  nn::Linear head = register_module("head", nn::Linear(12, 5));

  at::Tensor forward(const at::Tensor& tokens) {
    auto x = embed(tokens);
    x = x + b(torch::relu(a(x)));
    x = conv(x.unsqueeze(1)).relu().mean(1);
    return head(x.mean(1));
  }
};
TORCH_MODULE(Net);

void expect_close(const at::Tensor& ours, const at::Tensor& expected, const std::string& what) {
  ASSERT_TRUE(ours.defined()) << what;
  ASSERT_EQ(ours.sizes(), expected.sizes()) << what;
  EXPECT_LT((ours - expected).abs().max().item<double>(), 1e-5) << what;
}

bool is_of_adapters(const std::string& name) {
  return name.find(".lora_") != std::string::npos;
}

void expect_case(const Folder& folder, const std::string& name, const Communicator* world) {
  const std::string where = folder / name;
  const SafetensorsFile expected(where + ".safetensors");
  Net net;
  load_weights(net, folder / "base.safetensors");
  lora::apply(net, read_adapter_config(where));
  if (world != nullptr) fully_shard(net, {.mesh = *world, .start = Start::FromRank0}, wrap_classes({"Linear", "Conv2d"}));
  load_adapter(net, where);
  const auto full = [&](const at::Tensor& gradient_of) { return world != nullptr ? full_grad(gradient_of) : gradient_of.grad(); };
  const auto tokens = expected.read("tokens");
  const auto out = net(tokens);
  expect_close(out, expected.read("out"), "out");
  (out * expected.read("weights")).sum().backward();
  size_t trained = 0;
  for (const auto& item : net->named_parameters()) {
    if (!item.value().requires_grad()) continue;
    trained++;
    expect_close(full(item.value()), expected.read("grad." + item.key()), item.key());
  }
  const auto names = expected.names();
  EXPECT_EQ(trained, std::ranges::count_if(names, [](const auto& each) { return each.starts_with("grad."); }));
  const auto again = fmt::format("{}-{}", where, world == nullptr ? 0 : world->size());
  save_adapter(net, again, world == nullptr ? self_world() : *world, {.base = "base"});
  if (world == nullptr || world->is_first()) {
    const CatalogReader theirs(read_catalog(adapter_weights(where)));
    const SafetensorsFile ours(again + "/adapter_model.safetensors");
    EXPECT_EQ(ours.names().size(), theirs.catalog().tensors.size());
    for (const auto& [each, tensor] : theirs.catalog().tensors) EXPECT_TRUE(at::equal(ours.read(each), theirs.read(each))) << each;
  }
  {
    const lora::Disabled disabled(net);
    EXPECT_GT((net(tokens) - out).abs().max().item<double>(), 1e-3);
  }
  lora::merge(net);
  expect_close(net(tokens), expected.read("out"), "merged");
  const auto whole = full_state(net);
  for (const auto& [key, value] : whole) {
    if (!is_of_adapters(key)) expect_close(value, expected.read("merged." + key), key);
  }
}

TEST(Peft, HasTheNumbersOfPython) {
  const Folder folder;
  const auto written = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/peft_files.py", folder.path()});
  if (written.status == kNoPackage) GTEST_SKIP() << "build/python has no package peft";
  ASSERT_EQ(written.status, 0) << written.output;
  for (const auto* name : {"lora", "rslora", "dora", "layers", "biases", "pissa", "whole"}) {
    SCOPED_TRACE(name);
    expect_case(folder, name, nullptr);
    for (const int ranks : {1, 2, 3}) with_ranks(ranks, [&](const Communicator& world) { expect_case(folder, name, &world); });
  }
  // The same adapter in the file that older versions of PEFT wrote.
  expect_case(folder, "pickled", nullptr);
  with_ranks(2, [&](const Communicator& world) { expect_case(folder, "pickled", &world); });
  merge_adapter(folder / "base.safetensors", folder / "pickled", folder / "merged");
  const SafetensorsFile together(folder / "merged/model.safetensors"), theirs(folder / "pickled.safetensors");
  for (const auto& name : together.names()) expect_close(together.read(name), theirs.read("merged." + name), name);
  // A LoRA and a DoRA that are active together.
  const SafetensorsFile mixed(folder / "mixed.safetensors");
  Net net;
  load_weights(net, folder / "base.safetensors");
  for (const std::string adapter : {"mixed-lora", "mixed-dora"}) {
    lora::apply(net, read_adapter_config(folder / adapter), adapter);
    load_adapter(net, folder / adapter, adapter);
  }
  lora::set_adapters(net, {"mixed-lora", "mixed-dora"});
  expect_close(net(mixed.read("tokens")), mixed.read("out"), "mixed");
}

TEST(Peft, RefusesWhatDoesNotFitTogether) {
  const Folder folder;
  Net net;
  lora::apply(net, {.r = 2, .use_dora = true, .layers = {.target_modules = {"a"}}});
  lora::reset_magnitudes(net);
  save_adapter(net, folder / "adapter", self_world(), {.base = "base", .task_type = "CAUSAL_LM"});
  const auto config = read_file(folder / "adapter/adapter_config.json");
  EXPECT_THAT(config, HasSubstr(R"("task_type": "CAUSAL_LM")"));
  const auto with = [](std::string text, const std::string& before, const std::string& after) {
    return text.replace(text.find(before), before.size(), after);
  };
  const auto said_of = [&](const std::string& before, const std::string& after) {
    write_file(folder / "adapter/adapter_config.json", with(config, before, after));
    return message_of<IoError>([&] { read_adapter(folder / "adapter"); });
  };
  EXPECT_THAT(said_of(R"("use_dora": true)", R"("use_dora": false)"), HasSubstr("magnitudes of a DoRA for 'a'"));
  EXPECT_THAT(said_of(R"("lora_alpha": 8.0)", R"("lora_alpha": "8")"), HasSubstr("lora_alpha is missing, or has another type"));
  const auto of_another_run = AllOf(HasSubstr("adapter_model.safetensors: the matrix A of 'a' has rank 2, but r in adapter_config.json says 3"), SizeIs(Lt(300)));
  EXPECT_THAT(said_of(R"("r": 2)", R"("r": 3)"), of_another_run);
  Net other;
  lora::apply(other, read_adapter_config(folder / "adapter"));
  EXPECT_THAT(message_of<IoError>([&] { load_adapter(other, folder / "adapter"); }), of_another_run);
  EXPECT_THAT(message_of<UsageError>([&] { load_adapter(net, folder / "adapter"); }),
              HasSubstr("has rank 3 in 'a' and is multiplied by 2.6666666666666665, but adapter 'default' of the model has rank 2"));
  EXPECT_THAT(message_of<UsageError>([&] { read_adapter(folder / "nothing"); }), HasSubstr("not a folder of PEFT"));
  for (const std::string r : {"9223372036854775807", "2147483648", "18446744073709551616", "1e300", "-1", "2.5"}) {
    write_file(folder / "adapter/adapter_config.json", with(config, R"("r": 2)", R"("r": )" + r));
    EXPECT_THAT(message_of<ConfigError>([&] { read_adapter(folder / "adapter"); }),
                AllOf(HasSubstr("adapter_config.json: r: the rank can't be "), HasSubstr("from 1 to 1000000")));
    write_file(folder / "adapter/adapter_config.json", with(config, R"("rank_pattern": {})", R"("rank_pattern": {"a": )" + r + "}"));
    EXPECT_THAT(message_of<ConfigError>([&] { read_adapter(folder / "adapter"); }), HasSubstr("rank_pattern: the rank can't be "));
  }
  {
    auto text = config;
    text.insert(1, R"("use_qalora": true,)");
    write_file(folder / "adapter/adapter_config.json", text);
    EXPECT_THAT(message_of<ConfigError>([&] { read_adapter(folder / "adapter"); }), HasSubstr("use_qalora: true is not read here"));
  }
  // From a folder with a model and an adapter, PEFT and transformers load both.
  checkpoint::save(folder / "model", {.model = Net().get()}, self_world(), {.format = Format::Hub});
  EXPECT_THAT(message_of<UsageError>([&] { save_adapter(net, folder / "model", self_world()); }), HasSubstr("model has a model"));
  const auto save_there = [&] { checkpoint::save(folder / "adapter", {.model = Net().get()}, self_world(), {.format = Format::Hub}); };
  EXPECT_THAT(message_of<UsageError>(save_there), HasSubstr("adapter has an adapter"));
  EXPECT_FALSE(std::filesystem::exists(folder / "adapter/model.safetensors"));
}

/// Returns the error of merging an adapter of one layer into a file with one tensor of this dtype.
std::string refusal_to_merge(const Folder& folder, const std::string& name, at::ScalarType dtype) {
  torch::nn::Sequential net;
  net->push_back(std::string(name), nn::Linear(12, 16));
  lora::apply(net, {.r = 2, .layers = {.target_modules = {name}}});
  save_adapter(net, folder / name, self_world());
  std::filesystem::create_directories(folder / "base");
  write_file(folder / "base/config.json", R"({"tie_word_embeddings": true})");
  SafetensorsWriter writer(folder / "base/model.safetensors", {{.name = name + ".weight", .dtype = dtype, .sizes = {16, 12}}}, {});
  writer.write(at::zeros({16, 12}, dtype));
  writer.close();
  const auto said = message_of<UsageError>([&] { merge_adapter(folder / "base", folder / name, folder / "out"); });
  EXPECT_FALSE(std::filesystem::exists(folder / "out"));
  return said;
}

TEST(Peft, MergesIntoNothingThatWouldLoseTheAdapter) {
  const Folder folder;
  EXPECT_THAT(refusal_to_merge(folder, "a", at::kChar), HasSubstr("'a.weight' is Char, so"));
  EXPECT_THAT(refusal_to_merge(folder, "lm_head", at::kFloat), HasSubstr("both the embeddings and the output layer"));
}

TEST(Peft, MergesAnEmbeddingThatItReplacesOnlyWhereTheOutputLayerIsAnother) {
  const Folder folder;
  torch::nn::Sequential net;
  net->push_back(std::string("a"), nn::Linear(12, 16));
  net->push_back(std::string("embed_tokens"), torch::nn::Embedding(16, 12));
  lora::apply(net, {.r = 2, .layers = {.target_modules = {"a"}}, .modules_to_save = {"embed_tokens"}});
  save_adapter(net, folder / "adapter", self_world());
  std::filesystem::create_directories(folder / "base");
  SafetensorsWriter writer(folder / "base/model.safetensors",
                           {{.name = "a.weight", .dtype = at::kFloat, .sizes = {16, 12}},
                            {.name = "embed_tokens.weight", .dtype = at::kFloat, .sizes = {16, 12}}},
                           {});
  for (int i = 0; i < 2; i++) writer.write(at::zeros({16, 12}));
  writer.close();
  const auto merge = [&] { merge_adapter(folder / "base", folder / "adapter", folder / "out"); };
  write_file(folder / "base/config.json", R"({"tie_word_embeddings": true})");
  EXPECT_THAT(message_of<UsageError>(merge), HasSubstr("'embed_tokens.weight' is both the embeddings and the output layer"));
  write_file(folder / "base/config.json", R"({"tie_word_embeddings": false})");
  merge();
  const auto embedding = net->named_parameters()["embed_tokens.weight"];
  EXPECT_TRUE(at::equal(SafetensorsFile(folder / "out/model.safetensors").read("embed_tokens.weight"), embedding));
}

TEST(Peft, MergesAnAdapterOnceIntoAFolder) {
  const Folder folder;
  refusal_to_merge(folder, "a", at::kChar);  // called to write the adapter
  SafetensorsWriter writer(folder / "base/model.safetensors", {{.name = "a.weight", .dtype = at::kFloat, .sizes = {16, 12}}}, {});
  writer.write(at::ones({16, 12}));
  writer.close();
  const auto before = read_file(folder / "base/model.safetensors");
  EXPECT_THAT(message_of<UsageError>([&] { merge_adapter(folder / "base", folder / "a", folder / "base"); }),
              HasSubstr("a second call would merge the adapter again"));
  EXPECT_EQ(read_file(folder / "base/model.safetensors"), before);
  merge_adapter(folder / "base", folder / "a", folder / "out");
  EXPECT_TRUE(std::filesystem::exists(folder / "out/model.safetensors"));
}

}  // namespace
}  // namespace tessera::testing::peft_test
