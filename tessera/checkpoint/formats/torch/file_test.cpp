// Files of torch.save: those that we write, and damaged, hostile and foreign ones. What Python says of them is in torch/python_test.cpp.
#include "tessera/checkpoint/formats/torch/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/formats/torch/archive.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tests/testing/dtypes.h"
#include "tests/testing/folder.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::torch_file_test {
namespace {

namespace pickle = checkpoint::pickle;
using checkpoint::CatalogReader;
using checkpoint::read_torch_file;
using checkpoint::TorchFileWriter;
using pickle::Value;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::ThrowsMessage;

Value like(const at::Tensor& tensor) {
  return pickle::Tensor{.dtype = tensor.scalar_type(), .shape = tensor.sizes().vec()};
}

/// A file with a bit of everything.
void write_example(const std::filesystem::path& path) {
  const auto weight = at::arange(6, at::kFloat).view({2, 3});
  const auto tied = like(weight);
  const pickle::Dict model{{{"a.weight", tied}, {"b.weight", tied}, {"step", like(at::ones({}, at::kBFloat16))}}};
  const pickle::List list{{like(at::ones({0, 4}, at::kLong)), "text"}};
  TorchFileWriter writer(path, pickle::Dict{{{"model", model},
                                             {int64_t{7}, list},
                                             {"epoch", int64_t{3}},
                                             {"betas", checkpoint::from_json({0.9, 0.5})},
                                             {"groups", checkpoint::from_json({{{"lr", 0.5}}, {{"lr", nullptr}}})}}});
  writer.write(weight);
  writer.write(at::full({}, 2, at::kBFloat16));
  writer.write(at::ones({0, 4}, at::kLong));
  writer.close();
}

TEST(TorchFile, ReadsWhatItWrites) {
  const Folder folder;
  write_example(folder / "file.pt");
  const CatalogReader reader(read_torch_file(folder / "file.pt"));
  const auto& catalog = reader.catalog();
  EXPECT_TRUE(same_values(reader.read("model.a.weight"), at::arange(6, at::kFloat).view({2, 3})));
  EXPECT_EQ(reader.read("model.step").item<float>(), 2);
  EXPECT_EQ(reader.read("7.0").sizes(), at::IntArrayRef({0, 4}));
  EXPECT_EQ(catalog.tensors.size(), 3U);
  EXPECT_EQ(catalog.aliases, (std::map<std::string, std::string>{{"model.b.weight", "model.a.weight"}}));
  const std::map<std::string, nlohmann::json> values = {
      {"7.1", "text"}, {"epoch", 3}, {"betas", {0.9, 0.5}}, {"groups.0.lr", 0.5}, {"groups.1.lr", nullptr}};
  EXPECT_EQ(catalog.values, values);
  EXPECT_EQ(catalog.tensors.at("model.a.weight").boxes[0].offset % 64, 0U);
  EXPECT_EQ(catalog.checksums.size(), 2U) << "the tensor without values needs none";
  for (const auto& checksum : catalog.checksums) reader.verify(checksum);
}

TEST(TorchFile, HasEveryDtype) {
  const Folder folder;
  pickle::Dict tree;
  std::vector<at::Tensor> tensors;
  for (const auto dtype : kAllDtypes) {
    const auto bytes = at::arange(4 * static_cast<int64_t>(c10::elementSize(dtype)), at::kByte).remainder(2);
    tensors.push_back(bytes.view(dtype));
    tree.entries.emplace_back(c10::toString(dtype), like(tensors.back()));
  }
  TorchFileWriter writer(folder / "file.pt", tree);
  for (const auto& tensor : tensors) writer.write(tensor);
  writer.close();
  const CatalogReader reader(read_torch_file(folder / "file.pt"));
  for (size_t i = 0; i < std::size(kAllDtypes); i++) {
    const auto found = reader.read(c10::toString(kAllDtypes[i]));
    EXPECT_EQ(found.scalar_type(), kAllDtypes[i]);
    EXPECT_TRUE(same_values(found.view(at::kByte), tensors[i].view(at::kByte))) << kAllDtypes[i];
  }
}

TEST(TorchFile, RefusesWrongTensors) {
  const Folder folder;
  const pickle::Dict tree{{{"w", like(at::ones({2}))}}};
  {
    TorchFileWriter writer(folder / "file.pt", tree);
    EXPECT_THAT([&] { writer.write(at::ones({3})); }, ThrowsMessage<UsageError>(HasSubstr("is 'w', Float of [2]")));
    EXPECT_THAT([&] { writer.close(); }, ThrowsMessage<UsageError>(HasSubstr("'w' is missing")));
    writer.write(at::ones({2}));
    EXPECT_THAT([&] { writer.write(at::ones({2})); }, ThrowsMessage<UsageError>(HasSubstr("all its 1 tensors")));
  }
  EXPECT_FALSE(std::filesystem::exists(folder / "file.pt")) << "it was never closed";
  const auto refused = [&](const pickle::Tensor& tensor, const std::string& why) {
    const pickle::Dict one{{{"w", tensor}}};
    EXPECT_THAT([&] { TorchFileWriter(folder / "file.pt", one); }, ThrowsMessage<UsageError>(HasSubstr(why)));
  };
  refused({.dtype = at::kQInt8, .shape = {1}}, "QInt8");
  refused({.dtype = at::kFloat, .shape = {INT64_MAX, 2}}, "does not fit");
  EXPECT_THAT([&] { TorchFileWriter(folder / "file.pt", checkpoint::from_json(UINT64_MAX)); },
              ThrowsMessage<UsageError>(HasSubstr("too large")));
}

/// Writes an archive with this content, and with entries of these sizes.
std::filesystem::path write_archive(const Folder& folder, const Value& content, const std::map<std::string, std::string>& entries = {}) {
  auto path = folder / "file.pt";
  NewFile file(path);
  checkpoint::ZipWriter zip(file);
  zip.add("archive/data.pkl", pickle::write(content));
  for (const auto& [name, text] : entries) zip.add("archive/" + name, text);
  zip.close();
  file.commit();
  return path;
}

Value tuple(std::vector<Value> items) {
  return pickle::Tuple{.items = std::move(items)};
}
Value numbers(const std::vector<int64_t>& items) {
  return pickle::Tuple{.items = {items.begin(), items.end()}};
}
struct View {
  int64_t offset = 0;
  std::vector<int64_t> shape = {2}, strides = {1};
  int64_t count = 4;
  std::string storage = "torch.FloatStorage";
};
pickle::Object view(const View& options = {}) {
  const Value storage = pickle::Storage{.id = tuple({"storage", pickle::Global{options.storage}, "0", "cpu", options.count})};
  return {.name = "torch._utils._rebuild_tensor_v2",
          .arguments = {storage, options.offset, numbers(options.shape), numbers(options.strides), false, pickle::Dict{}}};
}
Value dict(std::vector<std::pair<Value, Value>> entries) {
  return pickle::Dict{.entries = std::move(entries)};
}
const std::map<std::string, std::string> kFourFloats = {{"data/0", std::string(16, '\0')}};

TEST(TorchFile, ReadsViews) {
  const Folder folder;
  const auto values = at::arange(4, at::TensorOptions(at::kCPU).dtype(at::kFloat));
  const std::string bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  const auto made = [](const std::string& name, std::vector<Value> arguments) {
    return pickle::Object{.name = name, .arguments = std::move(arguments)};
  };
  const Value attributes = made("torch._tensor._rebuild_from_type_v2",
                                {pickle::Global{"torch._utils._rebuild_tensor_v2"}, pickle::Global{"torch.nn.parameter.Parameter"},
                                 tuple(view({.offset = 3, .shape = {1}}).arguments), dict({})});
  const auto path = write_archive(folder,
                                  dict({{"transposed", view({.shape = {2, 2}, .strides = {1, 2}})},
                                        {"expanded", view({.offset = 2, .shape = {3}, .strides = {0}})},
                                        {"parameter", made("torch._utils._rebuild_parameter", {view(), true, dict({})})},
                                        {"same", view()},
                                        {"attributes", attributes},
                                        {"size", made("torch.Size", {numbers({1, 2})})},
                                        {"dtype", pickle::Global{"torch.float8_e4m3fn"}},
                                        {"device", made("torch.device", {"cuda", int64_t{1}})},
                                        {"bytes", pickle::Bytes{"\1\2"}}}),
                                  {{"data/0", bytes}});
  const CatalogReader reader(read_torch_file(path));
  EXPECT_TRUE(at::equal(reader.read("transposed"), values.view({2, 2}).t()));
  EXPECT_TRUE(same_values(reader.read("expanded"), at::full({3}, 2.)));
  EXPECT_TRUE(at::equal(reader.read("parameter"), values.narrow(0, 0, 2)));
  EXPECT_TRUE(at::equal(reader.read("attributes"), values.narrow(0, 3, 1)));
  EXPECT_EQ(reader.catalog().aliases, (std::map<std::string, std::string>{{"same", "parameter"}}));
  const std::map<std::string, nlohmann::json> plain = {
      {"size", {1, 2}}, {"dtype", "torch.float8_e4m3fn"}, {"device", "cuda:1"}, {"bytes", nlohmann::json::binary({1, 2})}};
  EXPECT_EQ(reader.catalog().values, plain);
}

TEST(TorchFile, RefusesWhatItCanNotRead) {
  const Folder folder;
  const auto refused = [&](const Value& content, const std::string& why, const std::map<std::string, std::string>& entries = kFourFloats) {
    const auto path = write_archive(folder, content, entries);
    EXPECT_THAT([&] { read_torch_file(path); }, ThrowsMessage<IoError>(AllOf(HasSubstr(path.string()), HasSubstr(why)))) << why;
  };
  const auto made = [](const std::string& name, std::vector<Value> arguments = {}) {
    return pickle::Object{.name = name, .arguments = std::move(arguments)};
  };
  refused(dict({{"w", made("os.system", {"true"})}}), "os.system");
  refused(dict({{"w", pickle::Global{"numpy.ndarray"}}}), "numpy.ndarray");
  refused(dict({{"w", made("torch._utils._rebuild_qtensor")}}), "quantized tensor 'w', which can't be read; save its dequantize()");
  refused(dict({{"w", made("torch._utils._rebuild_sparse_tensor")}}), "sparse tensor 'w'");
  refused(view(), "one tensor without a name");
  refused(pickle::List{}, "holds a list instead of a dict");
  refused(dict({{1.5, "x"}}), "a number as a key");
  refused(dict({{"a.b", "x"}, {"a", dict({{"b", "y"}})}}), "two values whose keys, joined by dots, are 'a.b'");
  refused(dict({{"w", made("torch.Tensor")}}), "an object at 'w'");
  refused(dict({{"w", view({.storage = "torch.QInt8Storage"})}}), "storage of the class torch.QInt8Storage");
  refused(dict({{"w", view()}}), "data/0, which is missing", {});
  refused(dict({{"w", view({.count = 5})}}), "'w' should have a storage of 5 values, but data/0 has 16 bytes");
  refused(dict({{"w", view({.count = INT64_MAX})}}), "should have a storage");
  refused(dict({{"w", view({.shape = {5}})}}), "outside of its storage");
  refused(dict({{"w", view({.offset = 3})}}), "outside of its storage");
  refused(dict({{"w", view({.offset = -1})}}), "outside of its storage");
  refused(dict({{"w", view({.offset = 5, .shape = {0}})}}), "outside of its storage");
  refused(dict({{"w", view({.strides = {-1}})}}), "outside of its storage");
  refused(dict({{"w", view({.shape = {-2}})}}), "outside of its storage");
  refused(dict({{"w", view({.shape = {3}, .strides = {INT64_MAX}})}}), "outside of its storage");
  refused(dict({{"w", view({.shape = {INT64_MAX, 2}, .strides = {0, 0}})}}), "outside of its storage");
  refused(dict({{"w", view({.shape = {2, 2}})}}), "no shape or strides");
  refused(dict({}), "another byte order", {{"byteorder", "big"}});
  auto lazy = view();
  lazy.arguments.push_back(dict({{"conj", true}}));
  refused(dict({{"w", lazy}}), "resolve_conj()");
  std::vector<std::pair<Value, Value>> leaves;
  for (int64_t i = 0; i < 20000; i++) leaves.emplace_back(i, i);
  auto nested = dict(leaves);
  for (int i = 0; i < 90; i++) nested = dict({{std::string(1000, 'a'), nested}});
  refused(nested, "far longer than the file");
}

TEST(TorchFile, RefusesOtherFormats) {
  const Folder folder;
  const auto refused = [&](const std::string& bytes, const std::string& why) {
    write_file(folder / "file.pt", bytes);
    EXPECT_THAT([&] { read_torch_file(folder / "file.pt"); }, ThrowsMessage<IoError>(AllOf(HasSubstr("file.pt"), HasSubstr(why))));
  };
  refused("", "empty");
  refused("{}", "not a zip archive");
  refused("\x80\x02\x8a\x0al\xfc\x9c\x46\xf9 j\xa8P\x19.", "before PyTorch 1.6");
  refused(std::string(257, 'a') + "ustar" + std::string(300, '\0'), "tar archive");
  refused("PK", "its end is missing");
  write_example(folder / "file.pt");
  auto packed = read_file(folder / "file.pt");
  packed[packed.rfind("PK\1\2") + 10] = 8;  // how the last entry is packed, in the directory
  refused(packed, "is compressed");
  write_example(folder / "file.pt");
  auto commented = read_file(folder / "file.pt");
  commented[commented.size() - 2] = 3;
  write_file(folder / "file.pt", commented + "abc");
  EXPECT_EQ(read_torch_file(folder / "file.pt").tensors.size(), 3U) << "zip archives may end with a comment";
  NewFile file(folder / "file.pt");
  checkpoint::ZipWriter zip(file);
  zip.add("some/text", "words");
  zip.close();
  file.commit();
  EXPECT_THAT([&] { read_torch_file(folder / "file.pt"); }, ThrowsMessage<IoError>(HasSubstr("it has no data.pkl")));
}

TEST(TorchFile, EveryDamageIsAnErrorOrHarmless) {
  const Folder folder;
  write_example(folder / "whole.pt");
  const auto whole = read_file(folder / "whole.pt");
  const auto path = folder / "file.pt";
  for (size_t length = 0; length < whole.size(); length++) {
    write_file(path, whole.substr(0, length));
    EXPECT_THAT([&] { read_torch_file(path); }, ThrowsMessage<IoError>(HasSubstr("file.pt"))) << length;
  }
  int harmless = 0;
  for (size_t place = 0; place < whole.size(); place++) {
    auto damaged = whole;
    damaged[place] = static_cast<char>(damaged[place] ^ (1 << (place % 8)));
    write_file(path, damaged);
    try {
      const CatalogReader reader(read_torch_file(path));
      for (const auto& checksum : reader.catalog().checksums) reader.verify(checksum);
      for (const auto& [name, tensor] : reader.catalog().tensors) reader.read(name);
      EXPECT_EQ(reader.read("model.a.weight").sum().item<float>(), 15);
      harmless++;
    } catch (const IoError&) {  // no other exception may come
    }
  }
  EXPECT_LT(harmless, static_cast<int>(whole.size() * 3 / 4)) << "padding and dates do not matter, but all else does";
}

TEST(TorchFile, DamageOfValuesIsFoundByTheirChecksum) {
  const Folder folder;
  write_example(folder / "file.pt");
  const auto catalog = read_torch_file(folder / "file.pt");
  auto bytes = read_file(folder / "file.pt");
  const auto place = catalog.tensors.at("model.a.weight").boxes[0].offset + 5;
  bytes[place] = static_cast<char>(bytes[place] ^ 1);
  write_file(folder / "file.pt", bytes);
  const CatalogReader reader(read_torch_file(folder / "file.pt"));
  EXPECT_THAT([&] { reader.verify(catalog.checksums[0]); }, ThrowsMessage<IoError>(HasSubstr("the bytes of 'model.a.weight'")));
  reader.verify(catalog.checksums[1]);
}

}  // namespace
}  // namespace tessera::testing::torch_file_test
