// The command of one's own has its place on the command line, and does its work.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "tessera/checkpoint/formats/safetensors.h"
#include "tessera/cli/commands.h"
#include "tessera/cli/flags.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::extending_command_test {
namespace {

struct Answer {
  int status;
  std::string out, errors;
};

Answer run(std::vector<std::string> words) {
  cli::Program app("", "tessera");
  app.require_subcommand(1);
  std::function<int()> chosen;
  cli::add_params_command(app, chosen);
  words.insert(words.begin(), "tessera");
  std::vector<char*> pointers;
  for (auto& word : words) pointers.push_back(word.data());
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  const int status = app.run(static_cast<int>(pointers.size()), pointers.data(), [&] { return chosen(); });
  return {.status = status, .out = ::testing::internal::GetCapturedStdout(), .errors = ::testing::internal::GetCapturedStderr()};
}

TEST(OwnCommand, CountsParameters) {
  const Folder folder;
  const auto file = folder / "net.safetensors";
  checkpoint::SafetensorsWriter writer(
      file, {{.name = "a", .dtype = at::kFloat, .sizes = {2, 3}}, {.name = "b", .dtype = at::kHalf, .sizes = {4}}});
  writer.write(at::zeros({2, 3}));
  writer.write(at::zeros({4}, at::kHalf));
  writer.close();
  EXPECT_EQ(run({"params", file}).out, "10 parameters in 2 tensors\n");
}

TEST(OwnCommand, ExplainsItselfAndItsErrors) {
  EXPECT_THAT(run({"params", "--help"}).out, ::testing::HasSubstr("tessera params bert-base-uncased"));
  const auto wrong = run({"params"});
  EXPECT_EQ(wrong.status, cli::kWrongUsage);
  EXPECT_THAT(wrong.errors, ::testing::HasSubstr("PATH is required"));
  const auto failed = run({"params", "no/such"});
  EXPECT_EQ(failed.status, cli::kFailed);
  EXPECT_THAT(failed.errors, ::testing::HasSubstr("there is no checkpoint no/such"));
}

}  // namespace
}  // namespace tessera::testing::extending_command_test
