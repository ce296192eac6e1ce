// Files of torch.save: the zip archive, and what is in it, also as a rank file of torch_xla.
#include "tessera/checkpoint/formats/torch/file.h"
#include "tessera/checkpoint/formats/torch/pickle.h"
#include "tessera/checkpoint/formats/torch_xla/torch_xla.h"

#include <ATen/ATen.h>

#include <fstream>
#include <iterator>

#include "fuzz.h"
#include "tessera/checkpoint/stored/runs.h"
#include "tests/testing/torch_xla_files.h"

namespace tessera::fuzz {
namespace {

void read_torch_file(std::span<const uint8_t> data) {
  static const auto path = folder() + "/file.pt";
  write_file(path, data);
  const auto read_all = [](checkpoint::Catalog catalog) {
    const checkpoint::CatalogReader reader(std::move(catalog));
    checkpoint::run_of(reader.catalog());
    for (const auto& checksum : reader.catalog().checksums) reader.verify(checksum);
    for (const auto& [name, tensor] : reader.catalog().tensors) {
      constexpr int64_t kMost = 1 << 24;  // a view may repeat few values as often as it likes
      if (whole_slice(tensor.shape).numel() < kMost) reader.read(name);
    }
  };
  expect_own_errors([&] { read_all(checkpoint::read_torch_file(path)); });
  expect_own_errors([&] { read_all(checkpoint::read_torch_xla(path)); });
}

namespace pickle = checkpoint::pickle;

std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

std::string torch_file_written() {
  const auto path = folder() + "/seed";
  const pickle::Value tensor = pickle::Tensor{.dtype = at::kFloat, .shape = {2, 3}};
  const pickle::Tensor other{.dtype = at::kFloat8_e5m2, .shape = {2}};
  const pickle::List list{{tensor, "x"}};
  checkpoint::TorchFileWriter writer(path,
                                     pickle::Dict{{{"w", tensor}, {int64_t{1}, list}, {"f8", other}, {"lr", pickle::List{{0.5, {}}}}}});
  writer.write(at::ones({2, 3}));
  writer.write(at::ones({2}, at::kFloat8_e5m2));
  writer.close();
  return bytes_of(path);
}

/// A rank file of torch_xla of one rank, with an optimizer.
std::string of_rank(testing::TorchXlaWay way) {
  testing::write_torch_xla(folder() + "/seed", 1, {{"a.w", at::ones({2, 3})}, {"b", at::ones({2, 3})}}, way);
  return bytes_of(testing::torch_xla_file(folder() + "/seed", 0, 1));
}

/// Without checksums, so that changes of the pickle are read.
std::string unchecked(std::string file) {
  for (const std::string mark : {"PK\1\2", "PK\3\4"}) {
    for (auto place = file.find(mark); place != std::string::npos; place = file.find(mark, place + 1)) {
      file.replace(place + (mark[2] == 1 ? 16 : 14), 4, std::string(4, '\0'));
    }
  }
  return file;
}

std::string archive(const pickle::Value& content) {
  const auto path = folder() + "/seed";
  NewFile file(path);
  checkpoint::ZipWriter zip(file);
  zip.add("x/data.pkl", pickle::write(content));
  zip.add("x/data/0", std::string(16, '\1'));
  zip.close();
  file.commit();
  return unchecked(bytes_of(path));
}

pickle::Value view(int64_t offset, std::vector<int64_t> shape, std::vector<int64_t> strides) {
  const auto numbers = [](const std::vector<int64_t>& items) { return pickle::Tuple{.items = {items.begin(), items.end()}}; };
  const pickle::Tuple id{.items = {"storage", pickle::Global{"torch.FloatStorage"}, "0", "cpu", int64_t{4}}};
  return pickle::Object{.name = "torch._utils._rebuild_tensor_v2",
                        .arguments = {pickle::Storage{.id = id}, offset, numbers(shape), numbers(strides), false, pickle::Dict{}}};
}

/// A model and an optimizer that knows it by numbers.
std::string run() {
  const auto dict = [](const pickle::Value& key, const pickle::Value& value) -> pickle::Value {
    return pickle::Dict{.entries = {{key, value}}};
  };
  const pickle::Dict group{
      .entries = {{"lr", 0.5}, {"params", pickle::List{.items = {int64_t{0}}}}, {"param_names", pickle::List{.items = {"w"}}}}};
  const auto values = view(0, {4}, {1});
  const pickle::Dict optimizer{
      .entries = {{"state", dict(int64_t{0}, dict("exp_avg", values))}, {"param_groups", pickle::List{.items = {group}}}}};
  return archive(pickle::Dict{.entries = {{"model", dict("w", values)}, {"optimizer", optimizer}, {"epoch", int64_t{3}}}});
}

std::vector<std::string> seeds_of_torch_file() {
  constexpr int64_t kHuge = int64_t{1} << 62;
  const auto one = [](const pickle::Value& value) { return archive(pickle::Dict{.entries = {{"w", value}}}); };
  return {
      torch_file_written(),
      unchecked(torch_file_written()),
      unchecked(of_rank(testing::TorchXlaWay::Values)),
      unchecked(of_rank(testing::TorchXlaWay::Flat)),
      unchecked(of_rank(testing::TorchXlaWay::Rows)),
      one(view(0, {2, 2}, {1, 2})),
      one(view(1, {2, 1000}, {1, 0})),
      one(view(0, {kHuge, 0}, {kHuge, 1})),
      one(view(kHuge, {1}, {1})),
      one(view(0, {kHuge}, {0})),
      one(view(0, {2}, {kHuge})),
      one(pickle::Object{.name = "torch._utils._rebuild_parameter", .arguments = {view(0, {4}, {1}), true, pickle::Dict{}}}),
      one(pickle::Object{.name = "torch._utils._rebuild_sparse_tensor"}),
      archive(view(0, {4}, {1})),
      run(),
      "PK\5\6",
      "",
  };
}

const Target target_torch_file("torch_file", read_torch_file, seeds_of_torch_file);

}  // namespace
}  // namespace tessera::fuzz
