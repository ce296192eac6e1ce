// Python's torch reads the files that we write, and we read those that it writes.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/dcp/dcp.h"
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tests/testing/dtypes.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::torch_python_test {
namespace {

using checkpoint::Catalog;
using checkpoint::CatalogReader;
using checkpoint::from_json;
using checkpoint::read_torch_file;
namespace pickle = checkpoint::pickle;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

std::string name_of(at::ScalarType dtype) {
  return std::string("torch.") + checkpoint::torch_dtype(dtype)->name;
}
at::Tensor bytes_of(at::ScalarType dtype) {
  return at::arange(4 * static_cast<int64_t>(c10::elementSize(dtype)), at::kByte).remainder(2).view(dtype);
}
pickle::Value like(const at::Tensor& tensor) {
  return pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

void write_file_of_ours(const std::filesystem::path& path) {
  std::vector<at::Tensor> tensors = {at::arange(6, at::kFloat).view({2, 3})};
  const auto tied = like(tensors[0]);
  pickle::Dict model{{{"a.weight", tied}, {"b.weight", tied}}};
  for (const auto dtype : kAllDtypes) {
    tensors.push_back(bytes_of(dtype));
    model.entries.emplace_back(name_of(dtype), like(tensors.back()));
  }
  tensors.push_back(at::ones({}));
  const pickle::Dict state{{{int64_t{0}, pickle::Dict{{{"step", like(tensors.back())}}}}}};
  const auto groups = nlohmann::json::array({{{"betas", {0.9, 0.999}}, {"fused", nullptr}, {"lr", 0.125}}});
  tensors.push_back(at::ones({0, 4}));
  const pickle::List list{{like(tensors.back()), "größe"}};
  checkpoint::TorchFileWriter writer(path,
                                     pickle::Dict{{{"model", model},
                                                   {"optimizer", pickle::Dict{{{"state", state}, {"param_groups", from_json(groups)}}}},
                                                   {"step", int64_t{3}},
                                                   {"list", list},
                                                   {"note", true},
                                                   {"bytes", pickle::Bytes{std::string("\0\377", 2)}},
                                                   {"large", -(int64_t{1} << 62)}}});
  for (const auto& tensor : tensors) writer.write(tensor);
  writer.close();
}

/// Writes a folder of two ranks: rank 1 has one row, and both have the scalar.
void write_dcp_of_ours(const std::filesystem::path& folder) {
  std::filesystem::create_directory(folder);
  const auto weight = at::arange(6, at::kBFloat16).view({3, 2});
  std::vector<checkpoint::DcpItem> all;
  for (int rank = 0; rank < 2; rank++) {
    checkpoint::DcpRankWriter writer(folder, rank);
    const TensorSlice rows{.shape = {3, 2}, .offsets = {2 * rank, 0}, .sizes = {2 - rank, 2}};
    writer.write({"model", "a.weight"}, rows, view_of(weight, rows));
    writer.write({"model", "scalar"}, whole_slice({}), at::full({}, 7, at::kLong));
    if (rank == 0) {
      writer.write({"groups", int64_t{0}, "lr"}, 0.5);
      writer.write({"groups", int64_t{0}, "params"}, pickle::List{{"x"}});
      writer.write({"epoch"}, int64_t{3});
    }
    std::ranges::move(writer.close(), std::back_inserter(all));
  }
  checkpoint::write_dcp_metadata(folder, all);
}

/// Whether the tensors of a catalog, and no others, have these values.
void expect_values(const Catalog& catalog, const nlohmann::json& expected, size_t others = 0) {
  const CatalogReader reader(catalog);
  for (const auto& checksum : catalog.checksums) reader.verify(checksum);
  EXPECT_EQ(catalog.tensors.size() + catalog.aliases.size(), expected.size() + others);
  for (const auto& [name, values] : expected.items()) {
    const auto alias = catalog.aliases.find(name);
    const auto found = reader.read(alias == catalog.aliases.end() ? name : alias->second);
    EXPECT_EQ(nlohmann::json(values), [&] {
      const auto flat = found.to(at::kDouble).flatten();
      return nlohmann::json(std::vector<double>(flat.const_data_ptr<double>(), flat.const_data_ptr<double>() + flat.numel()));
    }()) << name;
  }
}

void expect_refusal(const std::filesystem::path& path, const std::string& why) {
  EXPECT_THAT([&] { read_torch_file(path); }, ThrowsMessage<IoError>(AllOf(HasSubstr(path.string()), HasSubstr(why))));
}

TEST(TorchFiles, AreThoseOfPython) {
  const Folder folder;
  std::filesystem::create_directory(folder / "ours");
  write_file_of_ours(folder / "ours/file.pt");
  write_dcp_of_ours(folder / "ours/dcp");

  const auto [status, output] = run_program({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/torch_files.py", folder.path()});
  ASSERT_EQ(status, 0) << output;

  const auto theirs = folder / "theirs";
  const auto expected = nlohmann::json::parse(read_file(theirs / "expected.json"));
  const auto state = read_torch_file(theirs / "state.pt");
  expect_values(state, expected["state"]);
  EXPECT_EQ(state.aliases, (std::map<std::string, std::string>{{"head.weight", "embedding.weight"}}));
  EXPECT_TRUE(state.values.empty());

  const auto training = read_torch_file(theirs / "training.pt");
  expect_values(training, expected["training"]);
  EXPECT_EQ(training.values.at("step"), 3);
  EXPECT_EQ(training.values.at("optimizer.param_groups.0.lr"), 0.125);
  EXPECT_EQ(training.values.at("optimizer.param_groups.0.params"), nlohmann::json({0, 1, 2, 3, 4, 5, 6}));

  auto many = read_torch_file(theirs / "many.pt");
  EXPECT_FALSE(many.checksums.empty());
  expect_values(many, expected["many"], std::size(kAllDtypes));
  const CatalogReader reader(many);
  for (const auto dtype : kAllDtypes) {
    EXPECT_EQ(reader.info(name_of(dtype)).dtype, dtype);
    EXPECT_TRUE(at::equal(reader.read(name_of(dtype)).view(at::kByte), bytes_of(dtype).view(at::kByte))) << dtype;
  }
  const std::map<std::string, nlohmann::json> values = {
      {"text", "größe"},          {"none", nullptr},           {"bytes", nlohmann::json::binary({0, 255})},
      {"size", {1, 2}},           {"dtype", "torch.bfloat16"}, {"device", "cpu"},
      {"large", int64_t{1} << 62}};
  EXPECT_EQ(many.values, values);
  const auto without_checksums = read_torch_file(theirs / "no_checksums.pt");
  EXPECT_TRUE(without_checksums.checksums.empty());
  expect_values(without_checksums, expected["many"]);

  expect_refusal(theirs / "legacy.pt", "before PyTorch 1.6");
  const CatalogReader script(read_torch_file(theirs / "script.pt"));
  EXPECT_EQ(script.read("weight").sizes(), at::IntArrayRef({2, 2}));
  EXPECT_EQ(script.read("bias").sizes(), at::IntArrayRef({2}));
  expect_refusal(theirs / "quantized.pt", "quantized tensor 'w'");
  expect_refusal(theirs / "sparse.pt", "sparse tensor 'w'");
  expect_refusal(theirs / "conjugate.pt", "resolve_conj()");
  expect_refusal(theirs / "module.pt", "torch.nn.modules.linear.Linear");
  // Values of other classes that were saved with tensors are left out by name.
  const auto beside = read_torch_file(theirs / "classes.pt");
  EXPECT_EQ(CatalogReader(beside).read("model.w").sizes(), at::IntArrayRef({2, 3}));
  EXPECT_EQ(beside.values, (std::map<std::string, nlohmann::json>{{"step", 3}}));
  std::vector<std::string> left_out;
  for (const auto& [name, why] : beside.left_out) {
    left_out.push_back(name);
    EXPECT_THAT(why, HasSubstr("of a class of Python")) << name;
  }
  EXPECT_EQ(left_out, (std::vector<std::string>{"args", "best", "counts", "defaults", "lists.a", "net", "when"}));

  const auto sharded = checkpoint::read_dcp(theirs / "dcp");
  expect_values(sharded, nlohmann::json::parse(read_file(theirs / "dcp.json")), 1);  // one more tensor: list.0
  EXPECT_EQ(sharded.files.size(), 2U);
  EXPECT_EQ(sharded.tensors.at("model.0.weight").boxes.size(), 2U);
  EXPECT_EQ(sharded.tensors.at("optimizer.state.0.weight.exp_avg").boxes.size(), 2U);
  EXPECT_EQ(sharded.values.at("step"), 3);
  EXPECT_EQ(sharded.values.at("list.1"), "text");
  EXPECT_EQ(sharded.values.at("optimizer.param_groups.0.betas"), nlohmann::json({0.9, 0.999}));
  EXPECT_EQ(sharded.values.at("optimizer.param_groups.0.params").size(), 7U);
  EXPECT_FALSE(sharded.values.contains("scheduler"));
}

}  // namespace
}  // namespace tessera::testing::torch_python_test
