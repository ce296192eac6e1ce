#include "tessera/train/reporters.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tests/testing/folder.h"
#include "tests/testing/transports.h"

namespace tessera::train::reporters_test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using testing::message_of;

size_t files_in(const std::filesystem::path& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

TEST(Reporters, AreWhatTheNamesOfFilesSay) {
  const testing::Folder folder;
  std::filesystem::create_directories(folder / "lr.02");
  Reporters all({folder / "a/b.jsonl", "mlflow:" + (folder / "runs").string(), folder / "board", folder / "lr.01/", folder / "lr.02"});
  all.write(1, {{"loss", 0.5}});
  EXPECT_EQ(testing::read_file(folder / "a/b.jsonl"), "{\"step\":1,\"loss\":0.5}\n");
  EXPECT_TRUE(std::filesystem::exists(folder / "runs/0/meta.yaml"));
  EXPECT_EQ(report_format("mlflow"), ReportFormat::MlFlow);
  EXPECT_EQ(report_format("prometheus:9464"), ReportFormat::Prometheus);
  for (const auto* name : {"board", "lr.01", "lr.02"}) EXPECT_EQ(files_in(folder / name), 1U) << name;
  Reporters({}).write(1, {{"loss", 0.5}});
}

TEST(Reporters, SetDamagedLinesOfTheRecordAside) {
  const testing::Folder folder;
  testing::write_file(folder / "metrics.jsonl", "nonsense\n");
  ::setenv("TESSERA_RECORD", folder.path().c_str(), 1);
  Reporters({}, {.first_step = 5}).write(5, {{"loss", 0.5}});
  ::unsetenv("TESSERA_RECORD");
  EXPECT_EQ(testing::read_file(folder / "metrics.jsonl"), "{\"step\":5,\"loss\":0.5}\n");
  EXPECT_EQ(testing::read_file(folder / "metrics-1.jsonl"), "nonsense\n");
}

TEST(Reporters, RefuseWhatSaysNothing) {
  const testing::Folder folder;
  testing::write_file(folder / "file", "");
  for (const std::string name : {"", "metrics.txt", "metrics.JSONL", "lr.01", "mlflow:", "prometheus:", "prometheus:0", "prometheus:65536",
                                 "prometheus:x", "prometheus", "nonsense:x"}) {
    EXPECT_THAT(message_of<ConfigError>([&] { make_reporter(name); }), AllOf(HasSubstr("'" + name + "'"), HasSubstr("FOLDER/")));
  }
  EXPECT_THAT(message_of<ConfigError>([&] { make_reporter("prometheus:9465,m.jsonl"); }), HasSubstr("each place for metrics by itself"));
  EXPECT_THAT(message_of<ConfigError>([&] { make_reporter(folder / "file"); }), HasSubstr("FILE.jsonl"));
  EXPECT_THAT(message_of<ConfigError>([&] { make_reporter("a/b.csv"); }), AllOf(HasSubstr("write a/b.jsonl"), HasSubstr("to_csv('a/b.csv'")));
  EXPECT_THAT(message_of<ConfigError>([&] { make_reporter("wandb"); }), HasSubstr("docs/seeing.md"));
}

}  // namespace
}  // namespace tessera::train::reporters_test
