// Records that are written by hand, without modules and without paging: which of them a tensor needs, and what their draws depend on.
#include "tessera/shard/deferred/tape.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

namespace tessera::testing::tape_test {
namespace {

using c10::Dispatcher;

/// A vector on the tape, which begins as memory without values.
class Vector {
 public:
  Vector(Tape& tape, int64_t size) : tape_(tape), meta_(at::empty({size}, at::kMeta)), number(tape.new_number()) {}

  TapeTensor place(size_t argument = 0) const {
    TapeTensor result(meta_, number, meta_.nbytes(), at::kCPU);
    result.argument = argument;
    return result;
  }
  /// Records an operator in place, with this vector before the other arguments.
  void apply(const char* name, const char* overload, torch::jit::Stack others, std::optional<size_t> generator = {}) {
    TapeRecord record{.handle = Dispatcher::singleton().findSchemaOrThrow(name, overload), .operands = {place()}, .written = {number}};
    record.arguments = std::move(others);
    record.arguments.insert(record.arguments.begin(), at::Tensor());
    if (generator) record.draw = TapeDraw{.argument = *generator};
    tape_.append(std::move(record));
  }
  void fill(double value) { apply("aten::fill_", "Scalar", {value}); }
  void draw_uniform() { apply("aten::uniform_", "", {0.0, 1.0, c10::IValue()}, 3); }
  void add(const Vector& other) {
    TapeRecord record{.handle = Dispatcher::singleton().findSchemaOrThrow("aten::add_", "Tensor"),
                      .arguments = {at::Tensor(), at::Tensor(), 1},
                      .operands = {place(), other.place(1)},
                      .written = {number}};
    tape_.append(std::move(record));
  }
  at::Tensor values() const { return tape_.replay(place()); }

 private:
  Tape& tape_;
  const at::Tensor meta_;

 public:
  const size_t number;
};

TEST(Tape, ReplaysWhatATensorNeedsInTheOrderOfTheProgram) {
  Tape tape({});
  Vector a(tape, 3), b(tape, 3);
  a.fill(1);
  b.fill(10);
  a.add(b);
  b.fill(5);
  a.add(b);
  EXPECT_TRUE(at::equal(a.values(), at::full({3}, 16.0f)));
  EXPECT_TRUE(at::equal(b.values(), at::full({3}, 5.0f)));
  EXPECT_TRUE(at::equal(a.values(), at::full({3}, 16.0f))) << "each replay has memory of its own";
}

TEST(Tape, KeepsWhatOthersStillNeedOfAClosedTensor) {
  Tape tape({});
  Vector a(tape, 2), b(tape, 2), unused(tape, 2);
  b.fill(7);
  a.fill(1);
  a.add(b);
  unused.fill(3);
  tape.close(b.number);
  tape.close(unused.number);
  EXPECT_TRUE(at::equal(a.values(), at::full({2}, 8.0f)));
}

TEST(Tape, DrawsByTheNameOfTheTensor) {
  const auto drawn = [](const std::vector<std::string>& names, const std::string& wanted) {
    Tape tape(1);
    std::optional<at::Tensor> result;
    for (const auto& name : names) {
      Vector vector(tape, 5);
      vector.draw_uniform();
      tape.name(vector.number, name);
      tape.name(vector.number, "another name");  // has no effect, because the tensor has a name
      if (name == wanted) result = vector.values();
    }
    return *result;
  };
  EXPECT_TRUE(at::equal(drawn({"a", "b"}, "b"), drawn({"b"}, "b")));
  EXPECT_FALSE(at::equal(drawn({"a", "b"}, "a"), drawn({"a", "b"}, "b")));
}

TEST(Tape, ComputesPartsOfWhatIsDrawnAndElementwise) {
  Tape tape(1);
  Vector a(tape, 16);
  a.draw_uniform();
  a.apply("aten::mul_", "Scalar", {2.0});
  ASSERT_TRUE(tape.has_parts(a.place()));
  EXPECT_TRUE(at::equal(tape.replay(a.place(), {.begin = 5, .numel = 6}), a.values().narrow(0, 5, 6)));
  a.apply("aten::cumsum_", "", {0, c10::IValue()});
  EXPECT_FALSE(tape.has_parts(a.place()));
}

TEST(Tape, HasAFingerprintOfItsOperatorsAndNumbers) {
  const auto fingerprint = [](double value, uint64_t seed) {
    Tape tape(seed);
    Vector a(tape, 4);
    a.draw_uniform();
    a.apply("aten::mul_", "Scalar", {value});
    return tape.fingerprint(a.place());
  };
  EXPECT_EQ(fingerprint(2, 1), fingerprint(2, 1));
  EXPECT_NE(fingerprint(2, 1), fingerprint(3, 1));
  EXPECT_NE(fingerprint(2, 1), fingerprint(2, 2));
}

}  // namespace
}  // namespace tessera::testing::tape_test
