// Pages of the documentation that are made by tests.
#pragma once

#include <gtest/gtest.h>

#include <string>

#include "tessera/base/env.h"
#include "tests/testing/folder.h"

namespace tessera::testing {

/// Expects a page to hold this text. Writes it first if TESSERA_TEST_WRITE_PAGES is set. `test` is the name of the test in ctest.
inline void expect_page(const std::string& path, const std::string& text, const std::string& test) {
  if (env("TESSERA_TEST_WRITE_PAGES")) write_file(path, text);
  EXPECT_TRUE(read_file(path) == text) << path << " is not up to date; write it again with: TESSERA_TEST_WRITE_PAGES=1 ./check " << test;
}

}  // namespace tessera::testing
