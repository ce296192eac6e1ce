// Shells complete words by the scripts of `tessera completion`.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tests/testing/folder.h"
#include "tests/testing/launched.h"

namespace tessera::testing::completion_test {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::UnorderedElementsAre;

Launched::Ended tessera(Command arguments, const Environment& environment = {}) {
  arguments.insert(arguments.begin(), std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera");
  return Launched(arguments, environment).end();
}

struct Completion : ::testing::Test {
  const Folder folder;

  std::string script(const std::string& shell) const {
    static std::map<std::string, std::string> made;  // once for all tests
    if (!made.contains(shell)) {
      const auto ended = tessera({"completion", shell});
      EXPECT_EQ(ended.status, 0) << ended.err;
      made[shell] = ended.out;
    }
    write_file(folder / shell, made[shell]);
    return folder / shell;
  }

  /// What bash offers for the last word.
  Command offered(const Command& words) const {
    Command command = {"bash",
                       "--norc",
                       "-c",
                       "set -u; source \"$1\"; cd \"$2\"; shift 2; COMP_WORDS=(tessera \"$@\"); COMP_CWORD=$#; _tessera; "
                       "printf '%s\\n' \"${COMPREPLY[@]-}\"",
                       "bash",
                       script("bash"),
                       folder.path()};
    command.insert(command.end(), words.begin(), words.end());
    const auto ended = Launched(command).end();
    EXPECT_EQ(ended.status, 0);
    EXPECT_EQ(ended.err, "");
    return ended.out == "\n" ? Command() : lines(ended.out);
  }
};

TEST_F(Completion, OffersCommands) {
  EXPECT_THAT(offered({""}), AllOf(Contains("launch"), Contains("ckpt"), Contains("completion")));
  EXPECT_THAT(offered({"la"}), ElementsAre("launch"));
  EXPECT_THAT(offered({"ckpt", "in"}), ElementsAre("inspect"));
  EXPECT_THAT(offered({"ckpt", "launch", "in"}), ElementsAre("inspect"));  // launch is not a command of ckpt
  EXPECT_THAT(offered({"completion", ""}), UnorderedElementsAre("bash", "fish", "zsh"));
}

TEST_F(Completion, OffersFlagsAndTheirValues) {
  EXPECT_THAT(offered({"ckpt", "verify", "--"}), UnorderedElementsAre("--help", "--ckpt-prefix", "--cheap"));
  EXPECT_THAT(offered({"test", "-"}), AllOf(Contains("-h"), Contains("--transport")));
  EXPECT_THAT(offered({"test", "--transport", "s"}), UnorderedElementsAre("self", "shm"));
  EXPECT_THAT(offered({"test", "--transport", "=", "s"}), UnorderedElementsAre("self", "shm"));
  EXPECT_THAT(offered({"test", "--transport", "="}), Contains("gloo"));
  EXPECT_THAT(offered({"test", "--transport", "shm", "--li"}), ElementsAre("--limit"));
  EXPECT_THAT(offered({"test", "--ranks", ""}), IsEmpty());
  EXPECT_THAT(offered({"launch", "--mixed_precision", ""}), UnorderedElementsAre("no", "fp16", "bf16"));
}

TEST_F(Completion, OffersFilesAndPrograms) {
  write_file(folder / "two words", "");
  write_file(folder / "train", "");
  EXPECT_THAT(offered({"ckpt", "inspect", "two"}), ElementsAre("two words"));
  EXPECT_THAT(offered({"ckpt", "verify", "--ckpt_prefix", "tw"}), ElementsAre("two words"));
  EXPECT_THAT(offered({"launch", "--nproc-per-node", "2", "tra"}), Contains("train"));
  EXPECT_THAT(offered({"launch", "-n", "2", "mpiru"}), Not(Contains("--grace")));
  EXPECT_THAT(offered({"launch", "-n", "2", "./train", "two"}), ElementsAre("two words"));
  EXPECT_THAT(offered({"launch", "-n", "2", "./train", "--gr"}), IsEmpty());  // the program's own flags are not ours
}

// Completion offers what --help lists, for every command.
TEST_F(Completion, KnowsAllThatHelpKnows) {
  for (const auto& command : offered({""})) {
    const auto help = tessera({command, "--help"}).out;
    for (const auto& flag : offered({command, "--"})) EXPECT_THAT(help, HasSubstr(flag)) << command;
    for (size_t at = help.find("\n  --"); at != std::string::npos; at = help.find("\n  --", at + 1)) {
      const auto flag = help.substr(at + 3, help.find_first_of(" ,\n", at + 3) - at - 3);
      EXPECT_THAT(command == "help" ? offered({flag}) : offered({command, flag}), Contains(flag)) << command;
    }
    EXPECT_THAT(help, AllOf(HasSubstr("Examples:\n  "), HasSubstr("Exit status: "))) << command;
  }
}

TEST_F(Completion, OtherShellsOfferTheSame) {
  const auto says = [](const Command& command) { return Launched(command).end(); };
  const bool has_fish = says(shell("command -v fish")).status == 0, has_zsh = says(shell("command -v zsh")).status == 0;
  if (has_fish) {
    const auto fish = [&](const std::string& line) {
      const auto ended = says({"fish", "--no-config", "-c", "source $argv[1]; complete -C $argv[2]", script("fish"), line});
      EXPECT_EQ(ended.err, "");
      return ended.out;
    };
    EXPECT_THAT(fish("tessera ckpt ver"), HasSubstr("verify\tReads all files"));
    EXPECT_THAT(fish("tessera test --transport s"), AllOf(HasSubstr("shm"), HasSubstr("self"), Not(HasSubstr("gloo"))));
    EXPECT_THAT(fish("tessera ckpt verify --"), AllOf(HasSubstr("--cheap\tLook only"), Not(HasSubstr("--transport"))));
  }
  if (has_zsh) {
    EXPECT_EQ(says({"zsh", "-n", script("zsh")}).err, "");
  }
  if (!has_fish || !has_zsh) GTEST_SKIP() << "fish and zsh are not both installed here";
}

TEST_F(Completion, UnknownShellsAreNamed) {
  const auto ended = tessera({"completion", "ksh"});
  EXPECT_EQ(ended.status, 2);
  EXPECT_THAT(ended.err, HasSubstr("ksh"));
}

TEST(Manual, HasAPageForEachCommand) {
  const Folder folder;
  const auto ended = tessera({"manual", folder / "man1"});
  EXPECT_EQ(ended.status, 0) << ended.err;
  EXPECT_THAT(read_file(folder / "man1/tessera.1"), AllOf(HasSubstr(".SH COMMANDS\n.TP\n"), HasSubstr("tessera\\-launch(1)"), Not(HasSubstr("manual"))));
  const auto page = read_file(folder / "man1/tessera-ckpt-merge.1");
  EXPECT_THAT(page, AllOf(HasSubstr(".SH SYNOPSIS\ntessera ckpt merge [OPTIONS] IN OUT\n"), HasSubstr(".SH EXAMPLES\n.br\n  tessera ckpt merge ")));
  EXPECT_THAT(page, HasSubstr("\\fB\\-\\-max\\-shard\\-size SIZE\\fR\nThe largest file"));
  EXPECT_THAT(tessera({"--help"}).out, Not(HasSubstr("manual")));
  if (Launched(shell("command -v groff")).end().status != 0) GTEST_SKIP() << "groff is not installed here";
  EXPECT_EQ(Launched(shell("cd '" + folder.path().string() + "/man1' && for page in *.1; do groff -man -ww -Tutf8 $page >/dev/null; done")).end().err, "");
}

TEST(Help, HasBoldHeadingsOnTerminalsAlone) {
  const Command command = {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera", "--help"};
  const std::string bold = "\x1b[1mCommands:\x1b[0m";
  EXPECT_THAT(OnTerminal(command, {{"TERM", "xterm"}, {"NO_COLOR", ""}}).screen(), HasSubstr(bold));
  EXPECT_THAT(OnTerminal(command, {{"TERM", "xterm"}, {"NO_COLOR", "1"}}).screen(), AllOf(HasSubstr("Commands:"), Not(HasSubstr("\x1b"))));
  EXPECT_THAT(OnTerminal(command, {{"TERM", "dumb"}, {"NO_COLOR", ""}}).screen(), Not(HasSubstr("\x1b")));
  EXPECT_THAT(Launched(command, {{"TERM", "xterm"}}).end().out, Not(HasSubstr("\x1b")));
}

}  // namespace
}  // namespace tessera::testing::completion_test
