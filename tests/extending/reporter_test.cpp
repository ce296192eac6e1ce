// The reporter of one's own gets what a Trainer logs.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "prometheus_reporter.h"
#include "tests/testing/folder.h"
#include "tests/testing/net.h"

namespace tessera::testing::extending_reporter_test {
namespace {

TEST(OwnReporter, GetsWhatATrainerLogs) {
  const Folder folder;
  const auto file = folder / "training.prom";
  with_ranks(2, [&](const Communicator& world) {
    Trainer trainer({.world = world});
    trainer.add_tracker(std::make_unique<own::PrometheusReporter>(file, train::ReporterOptions{.rank = world.rank()}));
    trainer.log({{"loss", 0.5}, {"accuracy", 0.75}}, 1);
    trainer.log({{"loss", 0.25}}, 2);
  });
  EXPECT_EQ(read_file(file), "tessera_accuracy 0.75\ntessera_loss 0.25\ntessera_step 2\n");
}

TEST(OwnReporter, SaysWhatItCannotWrite) {
  const Folder folder;
  own::PrometheusReporter reporter(folder / "missing" / "training.prom");
  EXPECT_THAT(message_of<IoError>([&] { reporter.write(1, {{"loss", 0.5}}); }), ::testing::HasSubstr("missing/training.prom"));
}

}  // namespace
}  // namespace tessera::testing::extending_reporter_test
