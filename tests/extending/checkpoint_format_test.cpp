// The format of one's own is found by what lies in the folder, and its tensors are read, also by part.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/base/error.h"
#include "tessera/checkpoint/stored/catalogs.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::testing::extending_checkpoint_format_test {
namespace {

/// A file as numpy.save writes it.
void write_npy(const std::filesystem::path& path, const std::string& dict, const at::Tensor& values) {
  auto header = dict;
  header.resize(128 - 11, ' ');
  header += '\n';
  const std::string bytes(static_cast<const char*>(values.const_data_ptr()), values.nbytes());
  write_file(path, std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + bytes);
}

TEST(OwnCheckpointFormat, IsFoundAndRead) {
  const Folder folder;
  const auto values = at::arange(6, at::kFloat);
  write_npy(folder / "weight.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }", values);
  write_npy(folder / "turned.npy", "{'descr': '<f4', 'fortran_order': True, 'shape': (2, 3), }", values);
  write_npy(folder / "count.npy", "{'descr': '<i8', 'fortran_order': False, 'shape': (), }", at::tensor(7, at::kLong));
  EXPECT_EQ(checkpoint::format_of(folder.path()), checkpoint::Format::Npy);
  const checkpoint::CatalogReader stored(checkpoint::read_catalog(folder.path()));
  EXPECT_TRUE(at::equal(stored.read("weight"), values.view({2, 3})));
  EXPECT_TRUE(at::equal(stored.read("turned"), values.view({3, 2}).t()));
  EXPECT_EQ(stored.read("count").item<int64_t>(), 7);
  const auto part = at::empty({2, 1});
  stored.read("weight", {.shape = {2, 3}, .offsets = {0, 1}, .sizes = {2, 1}}, part);
  EXPECT_TRUE(at::equal(part, at::tensor({1.0F, 4.0F}).view({2, 1})));
}

TEST(OwnCheckpointFormat, RefusesWhatItCannotRead) {
  const Folder folder;
  write_npy(folder / "names.npy", "{'descr': '<U5', 'fortran_order': False, 'shape': (2,), }", at::zeros({10}));
  EXPECT_THAT(message_of<IoError>([&] { checkpoint::read_catalog(folder.path()); }),
              ::testing::HasSubstr("names.npy is no array of numbers: libtorch has no dtype '<U5'"));
}

}  // namespace
}  // namespace tessera::testing::extending_checkpoint_format_test
