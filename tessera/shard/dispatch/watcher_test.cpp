// Which operators of a thread a watcher sees, with watchers that only note the operators.
#include "tessera/shard/dispatch/watcher.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <thread>

#include "tessera/shard/dispatch/operators.h"
#include "tessera/shard/paging/paging.h"

namespace tessera::testing::watcher_test {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

/// Notes the operators that it runs. Opens the composites that it is told to open.
class NotingWatcher final : public Watcher {
 public:
  bool opens(const OperatorFacts& op, c10::DispatchKeySet /*keys*/) const override { return op.name() == opened; }
  void run(const c10::OperatorHandle& handle, const OperatorFacts& op, c10::DispatchKeySet below, torch::jit::Stack& stack) override {
    notes.push_back((is_casting() ? "cast by " : "") + op.name());
    handle.redispatchBoxed(below, &stack);
  }
  at::Tensor instead_of(const at::Tensor& operand) const override { return operand; }
  void replaced(const at::Tensor& /*operand*/, const at::Tensor& /*by*/) override {}

  std::string opened;
  std::vector<std::string> notes;
};

class Watched : public ::testing::Test {
 protected:
  Watched() { install_paging(); }

  const at::Tensor x_ = at::ones({2, 2});
  NotingWatcher watcher_;
};

TEST_F(Watched, SeesOperatorsOnOrdinaryTensorsOfItsThread) {
  {
    const Watching watching(&watcher_);
    EXPECT_EQ(Watcher::current(), &watcher_);
    x_.exp();
    std::thread([&] { EXPECT_EQ(Watcher::current(), nullptr), x_.sin(); }).join();
  }
  x_.cos();
  EXPECT_EQ(Watcher::current(), nullptr);
  EXPECT_THAT(watcher_.notes, ElementsAre("aten::exp"));
}

TEST_F(Watched, OpensCompositesIfItWants) {
  watcher_.opened = "aten::linear";
  const Watching watching(&watcher_);
  at::linear(x_, x_);
  EXPECT_THAT(watcher_.notes, ElementsAre("aten::t", "aten::matmul"));
}

TEST_F(Watched, MayBeWatchedByAnotherOneForAWhile) {
  NotingWatcher inner;
  const Watching watching(&watcher_);
  {
    const Watching nested(&inner);
    x_.exp();
    {
      const Unwatched unwatched;
      EXPECT_EQ(Watcher::current(), nullptr);
      x_.sin();
    }
    x_.log();
  }
  x_.cos();
  EXPECT_THAT(inner.notes, ElementsAre("aten::exp", "aten::log"));
  EXPECT_THAT(watcher_.notes, ElementsAre("aten::cos"));
}

TEST_F(Watched, IsToldOfCasts) {
  const CastingOperand before_watching;  // has no effect, because nothing watches yet
  const Watching watching(&watcher_);
  {
    const CastingOperand casting;
    x_.to(at::kDouble);
  }
  x_.exp();
  EXPECT_THAT(watcher_.notes, ElementsAre("cast by aten::to", "aten::exp"));
}

TEST_F(Watched, IsNotAskedWhereNobodyWatches) {
  { const Unwatched unwatched; }
  EXPECT_EQ(Watcher::current(), nullptr);
  x_.exp();
  EXPECT_THAT(watcher_.notes, IsEmpty());
}

}  // namespace
}  // namespace tessera::testing::watcher_test
