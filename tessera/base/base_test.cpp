#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/compat.h"
#include "tessera/base/error.h"
#include "tessera/base/log.h"
#include "tessera/base/move_module.h"
#include "tessera/base/words.h"
#include "tessera/version.h"

#include <ATen/ATen.h>
#include <torch/nn/modules/batchnorm.h>

namespace tessera::base_test {
namespace {

/// Returns the message of the exception that `act` throws.
template <class Act>
std::string message(const Act& act) {
  try {
    act();
  } catch (const std::exception& error) {
    return error.what();
  }
  ADD_FAILURE() << "an error was due, but none came";
  return {};
}

TEST(Error, KeepsItsKindWhenContextIsAdded) {
  try {
    try {
      throw TimeoutError("it took too long");
    } catch (...) {
      std::rethrow_exception(with_context("rank 2: "));
    }
  } catch (const TimeoutError& error) {
    EXPECT_STREQ(error.what(), "rank 2: it took too long");
  }
}

TEST(Log, GoesToTheSinkOfTheHostProgram) {
  std::vector<std::string> lines;
  auto before = set_log_sink([&](const LogRecord& record) { lines.emplace_back(record.text); });
  const auto level = set_log_level(LogLevel::Info);
  log(LogLevel::Debug, "too quiet");
  log(LogLevel::Info, "heard");
  set_log_level(level);
  log(LogLevel::Info, "too quiet by now");
  set_log_sink(std::move(before));
  EXPECT_THAT(lines, ::testing::ElementsAre("heard"));
}

TEST(Words, KnowUtf8) {
  for (const std::string text : {"", "a", "ö", "€", "😀", "\xed\x9f\xbf", "\xf4\x8f\xbf\xbf"}) EXPECT_TRUE(is_utf8(text)) << text;
  for (const std::string text :
       {"\x80", "\xc1\x80", "\xc3", "\xe0\x9f\x80", "\xed\xa0\x80", "\xf0\x8f\x80\x80", "\xf4\x90\x80\x80", "\xff", "\xe2\x82"}) {
    EXPECT_FALSE(is_utf8(text)) << text;
  }
}

TEST(Words, FindTheNearestName) {
  const std::vector<std::string> known = {"--num-epochs", "--num-workers", "--lr"};
  EXPECT_EQ(nearest_name("--num-epoch", known, "--"), "--num-epochs");
  EXPECT_EQ(nearest_name("--num_wrokers", known, "--"), "--num-workers");
  EXPECT_EQ(nearest_name("--ls", known, "--"), "--lr");
  EXPECT_EQ(nearest_name("--xy", known, "--"), "");  // the dashes do not make it similar
  EXPECT_EQ(nearest_name("-l", known, "--"), "");
  EXPECT_EQ(nearest_name("lunch", {"launch", "test"}), "launch");
  EXPECT_EQ(nearest_name("launch", {}), "");
}

TEST(Words, CountAndShowControlCharacters) {
  EXPECT_EQ(counted(1, "file"), "1 file");
  EXPECT_EQ(counted(0, "file"), "0 files");
  EXPECT_EQ(printable("größe\x1b[2J\n\x7f"), "größe\\x1b[2J\\x0a\\x7f");
  EXPECT_EQ(printable("two\nlines\t", "\n"), "two\nlines\\x09");
  EXPECT_EQ(printable("\xc2\x9b"
                      "2J\xc2"),
            "\\x9b2J\xc2");  // U+009B begins a terminal command, too
}

TEST(Compat, GuardsAStorageAndLiftsTheGuard) {
  const auto tensor = at::ones({4});
  auto& storage = *tensor.storage().unsafeGetStorageImpl();
  compat::guard_storage(storage, "these parameters are elsewhere");
  EXPECT_THAT(message([&] { (void)tensor.data_ptr<float>(); }), ::testing::HasSubstr("these parameters are elsewhere"));
  EXPECT_ANY_THROW((void)tensor.mutable_data_ptr<float>());
  for (int again = 0; again < 2; again++) {
    compat::unguard_storage(storage);
    EXPECT_NO_THROW((void)tensor.data_ptr<float>());
    EXPECT_NO_THROW((void)tensor.mutable_data_ptr<float>());
    compat::guard_storage(storage);  // with the message of the first guard
    EXPECT_THAT(message([&] { (void)tensor.data_ptr<float>(); }), ::testing::HasSubstr("these parameters are elsewhere"));
  }
}

TEST(Compat, TellsOfWritesOnce) {
  if (!compat::kTellsOfWrites) return;  // before libtorch 2.13 Tessera does not rely on it
  static int told = 0;
  auto tensor = at::ones({4});
  const auto listen = [&] { compat::tell_of_write(*tensor.storage().unsafeGetStorageImpl(), [](c10::StorageImpl*) { told++; }); };
  listen();
  (void)tensor.const_data_ptr<float>();
  (void)(tensor + 1);
  EXPECT_EQ(told, 0);
  tensor.add_(1);
  EXPECT_EQ(told, 1);
  tensor.add_(1);
  EXPECT_EQ(told, 1);
  listen();
  listen();
  (void)tensor.data_ptr<float>();
  EXPECT_EQ(told, 2);
}

TEST(Version, IsTheSameInAllForms) {
  EXPECT_EQ(std::string(version()), TESSERA_VERSION);
  const auto numbers = std::array{TESSERA_VERSION_MAJOR, TESSERA_VERSION_MINOR, TESSERA_VERSION_PATCH};
  EXPECT_EQ(joined(numbers, "."), TESSERA_VERSION);
}

struct DoublingNode : torch::autograd::Node {
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override { return {gradients[0] * 2}; }
};

TEST(Compat, MakesNodesThatTheEngineCanHold) {
  const compat::NodePtr node = compat::make_node<DoublingNode>();
  const torch::autograd::Edge edge(node, 0);
  EXPECT_TRUE(edge.is_valid());
}

TEST(MoveModule, KeepsTheTensorsAndMovesTheirValues) {
  torch::nn::BatchNorm1d norm(3);
  const auto held = norm->parameters();
  move_module(*norm, at::kMeta);
  for (const auto& tensor : held) EXPECT_TRUE(tensor.is_meta() && tensor.requires_grad());
  EXPECT_TRUE(norm->weight.is_same(held[0]));
  for (const auto& buffer : norm->buffers()) EXPECT_TRUE(buffer.is_meta());
  move_module(*norm, at::kCPU);  // tensors without values have none to move
  EXPECT_TRUE(norm->weight.is_meta());
}

}  // namespace
}  // namespace tessera::base_test
