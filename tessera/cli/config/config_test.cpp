// `tessera config` as a user meets it, also on a terminal.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <termios.h>

#include "tessera/config/settings.h"
#include "tests/testing/folder.h"
#include "tests/testing/launched.h"
#include "tests/testing/run_program.h"

namespace tessera::testing::config_test {
namespace {

using config::Settings;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

class Config : public ::testing::Test {
 protected:
  Command command(const Command& arguments) const {
    Command result = {std::filesystem::path(this_program()).parent_path().parent_path() / "bin/tessera"};
    result.insert(result.end(), arguments.begin(), arguments.end());
    return result;
  }
  Ended run(const Command& arguments, const std::string& input = {}) const {
    write_file(folder_ / "input", input);
    std::string line;
    for (const auto& word : command(arguments)) line += "'" + word + "' ";
    return run_program({"sh", "-c", line + "2>&1 <'" + (folder_ / "input").string() + "'"}, environment_);
  }
  Settings read(const std::filesystem::path& file) const {
    Settings settings;
    settings.read_file(file);
    return settings;
  }

  std::string says(const Command& arguments) {
    const auto ended = run(arguments);
    return std::to_string(ended.status) + " " + ended.output;
  }

  Folder folder_;
  const Environment environment_ = {{"HF_HOME", folder_.path()}, {"FSDP_VERSION", ""}};
  const std::filesystem::path file_ = folder_ / "accelerate/default_config.yaml";
};

TEST_F(Config, AsksInTheOrderOfAccelerate) {
  const auto ended = run({"config"},
                         "multi-CPU\n"        // machine
                         "1\nno\n\n"          // machines, DeepSpeed, FSDP
                         "1\n4\n"             // version 1, HYBRID_SHARD
                         "2\n1e6\n"           // SIZE_BASED_WRAP
                         "\nyes\n3\nyes\n\n"  // prefetch, checkpoints of Accelerate, SHARDED_STATE_DICT, forward prefetch, names
                         "no\n\nyes\n"        // loading, sync, checkpointing
                         "4\n3\n");           // ranks, bf16
  ASSERT_EQ(ended.status, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("wrote " + file_.string()));
  const auto settings = read(file_);
  settings.expect_consistent();
  EXPECT_EQ(settings.text("distributed_type"), "FSDP");
  EXPECT_EQ(settings.sharding_strategy(), "HYBRID_SHARD");
  EXPECT_EQ(settings.integer("fsdp_min_num_params"), 1'000'000);
  EXPECT_EQ(settings.text("fsdp_state_dict_type"), "SHARDED_STATE_DICT");
  EXPECT_TRUE(settings.is_true("fsdp_forward_prefetch"));
  EXPECT_TRUE(settings.is_true("fsdp_activation_checkpointing"));
  EXPECT_TRUE(settings.is_true("use_cpu"));
  EXPECT_EQ(settings.integer("num_processes"), 4);
  EXPECT_EQ(settings.text("mixed_precision"), "bf16");
  EXPECT_FALSE(std::filesystem::exists(folder_ / "accelerate/default_config.yaml.part"));
}

TEST_F(Config, AsksAgainAndSaysWhy) {
  const auto ended = run({"config", "--set", "fsdp_auto_wrap_policy=NO_WRAP"},
                         "5\n2\n0\n2\n2\n0\n\n0\nhost\n0\n29600\nperhaps\nno\n\n\n\n\n\n\n\n3\n4\n\n");
  EXPECT_THAT(ended.output, HasSubstr("  distributed_type '5' is not one of NO, MULTI_CPU"));
  EXPECT_THAT(ended.output, HasSubstr("  num_machines '0' is not a whole number from 1 to 65536\n"));
  EXPECT_THAT(ended.output, HasSubstr("machine_rank 2 is not below num_machines 2"));
  EXPECT_THAT(ended.output, HasSubstr("  this question needs an answer\n"));
  EXPECT_THAT(ended.output, HasSubstr("  'perhaps' is not yes or no\n"));
  EXPECT_THAT(ended.output, HasSubstr("num_processes 3 can't be divided among num_machines 2"));
}

// Questions must not lead to a file that no run accepts.
TEST_F(Config, LeavesOutWhatCanNotBeMeantOnCpus) {
  const std::string machine_and_version = "\n1\nno\nyes\n2\nyes\n";
  const auto on_cpus = run({"config"}, "multi-CPU" + machine_and_version + "TRANSFORMER_BASED_WRAP\n2\nBertLayer,T5Block\n\n\n\n\n2\n\n");
  EXPECT_EQ(on_cpus.status, 0) << on_cpus.output;
  EXPECT_THAT(on_cpus.output, Not(HasSubstr("in host memory")));
  EXPECT_THAT(on_cpus.output, HasSubstr("fsdp_transformer_layer_cls_to_wrap '2' is not the names of classes with commas between"));
  EXPECT_EQ(read(file_).text("fsdp_transformer_layer_cls_to_wrap"), "BertLayer,T5Block");
  EXPECT_THAT(run({"config"}, "multi-GPU" + machine_and_version).output, HasSubstr("in host memory"));
  EXPECT_THAT(says({"config", "default", "--config-file", folder_ / "cpu.yaml", "--set", "fsdp_offload_params=true"}),
              HasSubstr("use_cpu true contradicts fsdp_offload_params true"));
}

TEST_F(Config, NamesTheQuestionAtWhichTheInputEnds) {
  const auto ended = run({"config"}, "2\n");
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("the input ended at the question 'How many different machines will you use?'"));
  EXPECT_THAT(ended.output, HasSubstr("--set num_machines=VALUE"));
  EXPECT_FALSE(std::filesystem::exists(file_));
}

TEST_F(Config, TakesAnswersInAdvance) {
  write_file(folder_ / "answers", "distributed_type: FSDP\nuse_deepspeed: no\nfsdp_version: 2\n");
  auto ended = run({"config", "--answers", folder_ / "answers"});
  EXPECT_THAT(ended.output, HasSubstr("the input ended at the question 'How many different machines"));
  write_file(
      folder_ / "answers",
      "distributed_type: FSDP\nnum_machines: 1\nuse_deepspeed: no\nnum_processes: 8\nmixed_precision: no\nfsdp_config:\n  fsdp_version: 2\n"
      "  fsdp_reshard_after_forward: no\n  fsdp_offload_params: false\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
      "  fsdp_transformer_layer_cls_to_wrap: [A, B]\n  fsdp_state_dict_type: FULL_STATE_DICT\n"
      "  fsdp_cpu_ram_efficient_loading: true\n  fsdp_activation_checkpointing: false\nuse_parallelism_config: no\n");
  ended = run({"config", "--answers", folder_ / "answers", "--set", "num_processes=4", "--set", "gradient-clipping=1"});
  ASSERT_EQ(ended.status, 0) << ended.output;
  const auto settings = read(file_);
  EXPECT_EQ(settings.sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(settings.text("fsdp_transformer_layer_cls_to_wrap"), "A,B");
  EXPECT_EQ(settings.integer("num_processes"), 4);
  EXPECT_EQ(settings.number("gradient_clipping"), 1);
}

TEST_F(Config, RefusesWrongAnswersInAdvance) {
  EXPECT_THAT(says({"config", "--set", "mixed_precision=fp8"}),
              HasSubstr("2 tessera: --set mixed_precision=fp8: mixed_precision 'fp8' is not"));
  EXPECT_THAT(says({"config", "--set", "bf16"}), HasSubstr("2 tessera: --set bf16: write KEY=VALUE"));
  EXPECT_THAT(says({"config", "default", "--set", "num_procesess=1"}),
              HasSubstr("there is no key 'num_procesess' (did you mean num_processes?)"));
  EXPECT_THAT(says({"config", "--answers", folder_ / "none"}), HasSubstr("none can't be read: No such file"));
  EXPECT_THAT(says({"config", "defalt"}), HasSubstr("2 tessera: there is no command 'defalt' (did you mean default?)"));
  EXPECT_FALSE(std::filesystem::exists(file_));
}

TEST_F(Config, StartsFromDeepSpeed) {
  write_file(folder_ / "zero.json", R"({"zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "steps_per_print": 1})");
  const auto ended = run({"config"}, "2\n1\nyes\n/no/where\n" + (folder_ / "zero.json").string() + "\n2\n");
  ASSERT_EQ(ended.status, 0) << ended.output;
  EXPECT_THAT(ended.output, AllOf(HasSubstr("/no/where can't be read"), HasSubstr("steps_per_print of DeepSpeed has no counterpart")));
  EXPECT_EQ(read(file_).sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(read(file_).text("mixed_precision"), "bf16");
}

TEST_F(Config, LeavesFilesOfDeepSpeedAlone) {
  const auto zero = (folder_ / "zero.json").string(), mine = (folder_ / "mine.json").string();
  const std::string text = R"({"zero_optimization": {"stage": 2}, "steps_per_print": 1, "gradient_clipping": 0.5})";
  write_file(zero, text);
  EXPECT_THAT(says({"config", "update", "--config-file", zero}),
              HasSubstr("1 tessera: " + zero + " is a DeepSpeed file, and DeepSpeed can't read"));
  EXPECT_EQ(testing::read_file(zero), text);
  const auto made = says({"config", "update", "--config-file", zero, "--output-file", mine});
  EXPECT_THAT(made, AllOf(HasSubstr("0 "), HasSubstr("wrote " + mine)));
  EXPECT_THAT(testing::read_file(mine), ::testing::StartsWith("{\n"));
  EXPECT_EQ(read(mine).sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(read(mine).number("gradient_clipping"), 0.5);
  EXPECT_THAT(says({"config", "update", "--config-file", zero, "--output-file", mine}), HasSubstr("is there already"));
  EXPECT_THAT(says({"to-fsdp2", "--config-file", zero, "--overwrite"}),
              HasSubstr("1 tessera: " + zero + " is a DeepSpeed file, and DeepSpeed can't read"));
  EXPECT_EQ(testing::read_file(zero), text);
}

TEST_F(Config, HasDefaultsWhichCanBeUpdated) {
  ASSERT_EQ(run({"config", "default", "--mixed-precision", "bf16"}).status, 0);
  EXPECT_EQ(read(file_).sharding_strategy(), "FULL_SHARD");
  EXPECT_THAT(run({"config", "default"}).output, HasSubstr("is there already; change it with tessera config update"));
  ASSERT_EQ(run({"config", "update", "--set", "num_processes=4"}).status, 0);
  EXPECT_EQ(read(file_).integer("num_processes"), 4);
  EXPECT_EQ(read(file_).text("mixed_precision"), "bf16");
  EXPECT_THAT(run({"config", "update", "--config-file", folder_ / "none"}).output, HasSubstr("there is no configuration"));
}

TEST_F(Config, WritesNoTextThatIsNoUtf8) {
  const auto file = folder_ / "c.yaml";
  write_file(file,
             "num_processes: 2\nfsdp_config:\n  fsdp_version: 1\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  "
             "fsdp_transformer_layer_cls_to_wrap: B\xe4r\n");
  for (const auto* name : {"out.json", "out.yaml"}) {
    const auto out = (folder_ / name).string();
    for (const auto& words : {Command{"config", "update"}, Command{"to-fsdp2"}}) {
      auto command = words;
      command.insert(command.end(), {"--config-file", file.string(), "--output-file", out});
      EXPECT_THAT(says(command),
                  AllOf(HasSubstr("1 tessera: "), HasSubstr("fsdp_transformer_layer_cls_to_wrap"), HasSubstr("is not UTF-8")));
      EXPECT_FALSE(std::filesystem::exists(out));
    }
  }
}

TEST_F(Config, ExplainsWhereValuesComeFrom) {
  const auto file = folder_ / "c.yaml";
  write_file(file, "mixed_precision: fp16\nsame_network: false\nfsdp_config:\n  fsdp_version: 1\n  fsdp_offload_params: false\n");
  auto changed = command({"config", "explain", "--config-file", file, "--set", "num_processes=2"});
  auto terminal = Launched(changed, {{"FSDP_VERSION", "2"}}).end();
  EXPECT_EQ(terminal.status, 0);
  EXPECT_THAT(terminal.out, HasSubstr("file " + file.string() + ":1\n"));
  EXPECT_THAT(terminal.out, ::testing::ContainsRegex("fsdp_version +2 +environment FSDP_VERSION\n"));
  EXPECT_THAT(terminal.out, ::testing::ContainsRegex("num_processes +2 +flag --set num_processes=2\n"));
  EXPECT_THAT(terminal.out, ::testing::ContainsRegex("fsdp_auto_wrap_policy +NO_WRAP +default\n"));
  EXPECT_THAT(terminal.out, AllOf(HasSubstr("The sharding strategy is FULL_SHARD.\n"), HasSubstr(":2: same_network false has no effect")));
}

TEST_F(Config, IsConvertedToVersion2) {
  const auto old = folder_ / "old.yaml", converted = folder_ / "new.yaml";
  write_file(old, "num_processes: 4\nfsdp_config:\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_backward_prefetch: NO_PREFETCH\n");
  EXPECT_EQ(run({"to-fsdp2", "--config-file", old}).status, 2);
  const auto ended = run({"to-fsdp2", "--config-file", old, "--output-file", converted});
  ASSERT_EQ(ended.status, 0) << ended.output;
  EXPECT_THAT(ended.output, HasSubstr("old.yaml:4: fsdp_backward_prefetch NO_PREFETCH has no key in version 2"));
  EXPECT_EQ(read(converted).text("fsdp_version"), "2");
  EXPECT_EQ(read(converted).sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_THAT(run({"config", "to-fsdp2", "--config-file", old, "--output-file", converted}).output, HasSubstr("is there already"));
  const auto again = folder_ / "again.yaml";
  EXPECT_THAT(says({"to-fsdp2", "--config-file", converted, "--output-file", again}),
              AllOf(HasSubstr("0 "), HasSubstr("new.yaml has fsdp_version 2 already\n"), HasSubstr("wrote " + again.string())));
  EXPECT_EQ(testing::read_file(again), testing::read_file(converted));
  EXPECT_EQ(run({"config", "to-fsdp2", "--config-file", old, "--overwrite"}).status, 0);
  EXPECT_THAT(run({"config", "to-fsdp2", "--config-file", old, "--overwrite"}).output, HasSubstr("has fsdp_version 2 already"));
}

class ConfigOnTerminal : public Config {
 protected:
  static void type(const OnTerminal& terminal, const std::string& keys) {
    ASSERT_EQ(::write(terminal.keyboard.get(), keys.data(), keys.size()), static_cast<ssize_t>(keys.size()));
  }
  static bool is_as_it_was(const OnTerminal& terminal) {
    termios state{};
    ::tcgetattr(terminal.keyboard.get(), &state);
    return (state.c_lflag & ICANON) != 0 && (state.c_lflag & ECHO) != 0 && (state.c_lflag & ISIG) != 0;
  }
};

constexpr auto kUp = "\x1b[A", kDown = "\x1b[B";

TEST_F(ConfigOnTerminal, HasMenus) {
  OnTerminal terminal(command({"config"}), environment_);
  terminal.wait_for({"Which type of machine", "> 2. multi-CPU"});
  type(terminal, kDown);
  terminal.wait_for({"> 3. multi-GPU"});
  type(terminal, std::string(kDown) + kDown + kDown);  // around
  terminal.wait_for({"> 2. multi-CPU"});
  type(terminal, "\r");
  terminal.wait_for({"Which type of machine are you using? multi-CPU", "How many different machines"});
  EXPECT_TRUE(is_as_it_was(terminal));
  type(terminal, "\n\n\n");
  terminal.wait_for({"FSDP version", "> 2. 2"});
  type(terminal, "1");
  terminal.wait_for({"> 1. 1"});
  type(terminal, "\r");
  terminal.wait_for({"sharding strategy", "> 1. FULL_SHARD"});
  type(terminal, kUp);
  terminal.wait_for({"> 5. HYBRID_SHARD_ZERO2"});
  type(terminal, "x9\x1bOA\r");  // keys without a meaning change nothing
  terminal.wait_for({"strategy? HYBRID_SHARD", "wrap policy", "> 1. TRANSFORMER"});
  type(terminal, "j\r");
  terminal.wait_for({"policy? SIZE_BASED_WRAP", "at least"});
  type(terminal, "1e8\n");
  terminal.wait_for({"prefetch policy", "> 1. BACKWARD_PRE"});
  type(terminal, "\r");
  terminal.wait_for({"those of Accelerate"});
  type(terminal, "yes\n");
  terminal.wait_for({"state dict type", "> 3. SHARDED_STATE_DICT"});
  type(terminal, "\r");
  terminal.wait_for({"already in forward"});
  type(terminal, "\n\n\n\n2\n");
  terminal.wait_for({"mixed precision", "> 1. no"});
  type(terminal, "\x1b[1;2B\x1b[B\r");  // the first with shift
  EXPECT_THAT(terminal.screen(), HasSubstr("wrote " + file_.string()));
  EXPECT_EQ(terminal.process.wait(std::chrono::seconds(10)), 0);
  EXPECT_TRUE(is_as_it_was(terminal));
  const auto settings = read(file_);
  EXPECT_EQ(settings.text("fsdp_version"), "1");
  EXPECT_EQ(settings.sharding_strategy(), "HYBRID_SHARD");
  EXPECT_EQ(settings.integer("fsdp_min_num_params"), 100'000'000);
  EXPECT_EQ(settings.text("mixed_precision"), "bf16");
}

TEST_F(ConfigOnTerminal, GivesTheTerminalBack) {
  for (const std::string how : {"ctrl-c", "ctrl-d", "signal"}) {
    OnTerminal terminal(command({"config"}), environment_);
    terminal.wait_for({"Which type of machine", "> 2. multi-CPU", "3. multi-GPU"});
    EXPECT_TRUE(comes_true([&] { return !is_as_it_was(terminal); }));
    if (how == "signal") {
      ::kill(terminal.process.pid(), SIGTERM);
    } else {
      type(terminal, how == "ctrl-c" ? "\x03" : "\x04");
    }
    const auto screen = terminal.screen();
    EXPECT_EQ(terminal.process.wait(std::chrono::seconds(10)), how == "signal"   ? 128 + SIGTERM
                                                               : how == "ctrl-c" ? 128 + SIGINT
                                                                                 : 1)
        << screen;
    EXPECT_TRUE(is_as_it_was(terminal)) << how;
    EXPECT_THAT(screen, HasSubstr("\x1b[?25h")) << how;  // the cursor is shown again
    if (how == "ctrl-d") {
      EXPECT_THAT(screen, HasSubstr("the input ended at the question"));
    }
  }
  EXPECT_FALSE(std::filesystem::exists(file_));
}

TEST_F(Config, GivesUpAfterManyWrongAnswers) {
  std::string input;
  for (int i = 0; i < 30; i++) input += "nonsense\n";
  const auto ended = run({"config"}, input);
  EXPECT_EQ(ended.status, 1);
  EXPECT_THAT(ended.output, HasSubstr("was asked 20 times without a valid answer"));
  EXPECT_FALSE(std::filesystem::exists(file_));
}

TEST_F(Config, WantsAFileAndNoFolder) {
  EXPECT_THAT(says({"config", "default", "--config-file", folder_.path()}), HasSubstr("is a folder; name a file in it"));
  EXPECT_THAT(says({"config", "explain", "--config-file", std::string(300, 'a')}), Not(HasSubstr("filesystem error")));
}

}  // namespace
}  // namespace tessera::testing::config_test
