// The main function of all test programs. `test_shard` runs every test of its room, `test_shard unit/layout` those of
// tessera/shard/unit/layout_test.cpp. gtest's flags work with both.
#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "tessera/testing/child_task.h"

namespace {

/// Narrows gtest's filter to the tests of one source. Returns how many tests the source has.
int select_source(const std::string& name) {
  const auto end = "/" + name + "_test.cpp";
  const auto& all = *::testing::UnitTest::GetInstance();
  std::string others;
  int selected = 0;
  for (int i = 0; i < all.total_test_suite_count(); i++) {
    const auto& suite = *all.GetTestSuite(i);
    for (int k = 0; k < suite.total_test_count(); k++) {
      const auto& test = *suite.GetTestInfo(k);
      if (std::string(test.file()).ends_with(end)) {
        selected++;
      } else {
        others += std::string(":") + suite.name() + "." + test.name();
      }
    }
  }
  auto filter = ::testing::GTEST_FLAG(filter);
  if (filter.find('-') == std::string::npos) filter += '-';
  ::testing::GTEST_FLAG(filter) = filter + others;
  return selected;
}

}  // namespace

int main(int argc, char** argv) {
  if (const auto status = tessera::testing::run_child_task()) return *status;
  ::testing::InitGoogleTest(&argc, argv);
  if (argc > 2 || (argc == 2 && select_source(argv[1]) == 0)) {
    std::fprintf(stderr, "there is no test in %s_test.cpp of this program; usage: %s [SOURCE, such as unit/layout] [gtest's flags]\n",
                 argv[1], argv[0]);
    return 2;
  }
  return RUN_ALL_TESTS();
}
