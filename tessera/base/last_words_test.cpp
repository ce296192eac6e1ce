// An exception that nobody catches, in a child process: this program, told what to throw.
#include "tessera/base/last_words.h"

#include <ATen/ATen.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <cstdio>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "tessera/base/error.h"

namespace tessera::last_words_test {
namespace {

/// Throws in a thread of its own, where nobody catches the exception; gtest would catch one in this thread.
void throw_uncaught(std::string_view kind) {
  const rlimit none{};
  ::setrlimit(RLIMIT_CORE, &none);
  std::printf("said before, ");  // without a line end, the text stays in the buffer
  std::set_terminate([] {
    std::fprintf(stderr, "the program's own handler");
    std::_Exit(7);
  });
  say_last_words();
  say_last_words();
  std::thread([kind] {
    if (kind == "ours") throw ConfigError("a setting is missing");
    if (kind == "libtorch's") {
      note_place("forward", "layers.3");
      at::ones({2, 3}).mm(at::ones({2, 3}));
    }
    if (kind == "another") throw std::runtime_error("somebody else's");
    std::terminate();
  }).join();
}

TEST(LastWords, AreTheMessageOfAnErrorOfTessera) {
  EXPECT_EXIT(throw_uncaught("ours"), ::testing::ExitedWithCode(1), ::testing::MatchesRegex("[a-z_]+: a setting is missing\n"));
}

TEST(LastWords, OfAnErrorOfLibtorchAreItsMessageAndTheLastUnitWithoutCalls) {
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
  EXPECT_EXIT(throw_uncaught("libtorch's"), ::testing::ExitedWithCode(1),
              ::testing::MatchesRegex("[a-z_]+: mat1 and mat2 shapes cannot be multiplied \\(2x3 and 2x3\\); the part of the "
                                      "model that this thread used last is 'layers.3' \\(forward\\) \\(TORCH_SHOW_CPP_STACKTRACES=1 shows the calls\\)\n"));
  ::setenv("TORCH_SHOW_CPP_STACKTRACES", "1", 1);
  EXPECT_EXIT(throw_uncaught("libtorch's"), ::testing::ExitedWithCode(1), "frame #0");
  ::unsetenv("TORCH_SHOW_CPP_STACKTRACES");
}

TEST(LastWords, LeaveTheCallsOutOfWhatBecomesAnErrorOfTessera) {
  std::string said;
  try {
    try {
      at::ones({2, 3}).mm(at::ones({2, 3}));
    } catch (const std::exception&) {
      std::rethrow_exception(with_context("rank 1: "));
    }
  } catch (const Error& error) {
    said = error.what();
  }
  EXPECT_EQ(said, "rank 1: mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)");
}

TEST(LastWords, OfOtherExceptionsAreThoseOfTheProgram) {
  EXPECT_EXIT(throw_uncaught("another"), ::testing::ExitedWithCode(7), "^the program's own handler$");
  EXPECT_EXIT(throw_uncaught(""), ::testing::ExitedWithCode(7), "^the program's own handler$");
}

}  // namespace
}  // namespace tessera::last_words_test
