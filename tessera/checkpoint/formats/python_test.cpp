// Python's safetensors package reads the files that we write, and we read those that it writes.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tests/testing/folder.h"
#include "tests/testing/run_program.h"
#include "tests/testing/same_tensors.h"

namespace tessera::testing::python_test {
namespace {

TEST(Safetensors, AreThoseOfPython) {
  const Folder folder;
  std::map<std::string, at::Tensor> tensors;
  for (const auto dtype :
       {at::kDouble, at::kFloat, at::kHalf, at::kBFloat16, at::kLong, at::kInt, at::kShort, at::kChar, at::kByte, at::kBool}) {
    tensors[std::string("größe.") + c10::toString(dtype)] = at::arange(6).to(dtype).view({2, 3});
  }
  tensors["scalar"] = at::scalar_tensor(5, at::kFloat);
  tensors["empty"] = at::empty({4, 0});
  std::vector<checkpoint::SafetensorsEntry> entries;
  for (const auto& [name, tensor] : tensors)
    entries.push_back({.name = name, .dtype = tensor.scalar_type(), .sizes = tensor.sizes().vec()});
  checkpoint::SafetensorsWriter writer(folder / "ours", entries, {{"format", "pt"}});
  for (const auto& [name, tensor] : tensors) writer.write(tensor);
  writer.close();

  // Python checks the values of our file, and writes the same values to its own.
  const auto [status, output] = run_program({TESSERA_TEST_READER, TESSERA_ROOT "/tests/python/safetensors_files.py", folder / "ours", folder / "theirs"});
  ASSERT_EQ(status, 0) << output;

  const checkpoint::SafetensorsFile theirs(folder / "theirs");
  EXPECT_EQ(theirs.metadata().at("written by"), "python");
  tensors.erase("größe.BFloat16");
  ASSERT_EQ(theirs.names().size(), tensors.size());
  for (const auto& [name, tensor] : tensors) {
    EXPECT_EQ(theirs.info(name).dtype, tensor.scalar_type()) << name;
    EXPECT_TRUE(same_values(theirs.read(name), tensor)) << name;
  }
}

}  // namespace
}  // namespace tessera::testing::python_test
