// The main function of all test programs. `test_shard` runs every test of tessera/shard, `test_shard unit/layout` the tests of
// tessera/shard/unit/layout_test.cpp.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tests/testing/child_task.h"
#include "tests/testing/default_device.h"

namespace {

/// Selects the tests of one source.
void select_source(const std::string& name) {
  const auto end = "/" + name + "_test.cpp";
  const auto& all = *::testing::UnitTest::GetInstance();
  std::string selected;
  for (int i = 0; i < all.total_test_suite_count(); i++) {
    const auto& suite = *all.GetTestSuite(i);
    std::string tests;
    int own = 0;
    for (int k = 0; k < suite.total_test_count(); k++) {
      const auto& test = *suite.GetTestInfo(k);
      if (!std::string(test.file()).ends_with(end)) continue;
      tests += std::string(suite.name()) + "." + test.name() + ":";
      own++;
    }
    selected += own == suite.total_test_count() ? std::string(suite.name()) + ".*:" : tests;
  }
  ::testing::GTEST_FLAG(filter) = selected;
}

/// Sets the default device before the global variables of tests, which may be tensors, are initialized.
[[gnu::init_priority(200)]] const struct Chosen {
  Chosen() { tessera::testing::use_default_device(); }
} chosen;

}  // namespace

int main(int argc, char** argv) {
  if (const auto status = tessera::testing::run_child_task()) return *status;
  ::testing::InitGoogleTest(&argc, argv);
  if (argc > 2 || (argc == 2 && ::testing::GTEST_FLAG(filter) != "*")) {
    std::fprintf(stderr, "usage: %s [SOURCE, such as unit/layout | --gtest_filter=TESTS] [other flags of gtest]\n", argv[0]);
    return 2;
  }
  if (argc == 2) select_source(argv[1]);
  const int status = RUN_ALL_TESTS();
  if (::testing::UnitTest::GetInstance()->test_to_run_count() > 0 || ::testing::GTEST_FLAG(list_tests)) return status;
  std::fprintf(stderr, "no test of %s was chosen\n", argv[0]);
  return 2;
}
