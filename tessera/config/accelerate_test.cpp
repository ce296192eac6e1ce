// Tessera reads files that Python's accelerate has written, and accelerate reads Tessera's.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "tessera/base/process.h"
#include "tessera/config/settings.h"
#include "tests/testing/folder.h"

namespace tessera::testing::accelerate_test {
namespace {

using config::Origin;
using config::Settings;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

Settings settings_of(const std::vector<std::pair<const char*, const char*>>& values) {
  Settings settings;
  for (const auto& [key, value] : values) settings.set(key, value, Origin::Flag, key);
  return settings;
}

const std::map<std::string, Settings> kOurs = {
    {"one", settings_of({{"num_processes", "2"},
                         {"mixed_precision", "bf16"},
                         {"debug", "true"},
                         {"fsdp_sharding_strategy", "HYBRID_SHARD"},
                         {"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"},
                         {"fsdp_transformer_layer_cls_to_wrap", "BertLayer,T5Block"},
                         {"fsdp_backward_prefetch", "NO_PREFETCH"},
                         {"fsdp_forward_prefetch", "true"},
                         {"fsdp_use_orig_params", "true"},
                         {"fsdp_cpu_ram_efficient_loading", "true"},
                         {"fsdp_sync_module_states", "true"},
                         {"fsdp_activation_checkpointing", "true"},
                         {"fsdp_state_dict_type", "FULL_STATE_DICT"},
                         {"fsdp_ignored_modules", "head.*"},
                         {"fsdp_offload_params", "true"}})},
    {"two", settings_of({{"num_processes", "4"},
                         {"fsdp_version", "2"},
                         {"fsdp_reshard_after_forward", "false"},
                         {"fsdp_auto_wrap_policy", "SIZE_BASED_WRAP"},
                         {"fsdp_min_num_params", "1e6"},
                         {"parallelism_config_dp_replicate_size", "2"},
                         {"parallelism_config_dp_shard_size", "2"}})},
    {"cpu", settings_of({{"distributed_type", "MULTI_CPU"},
                         {"use_cpu", "true"},
                         {"num_processes", "3"},
                         {"gpu_ids", "0,1"},
                         {"gradient_clipping", "0.5"},
                         {"gradient_accumulation_steps", "4"}})},
};

const Settings kWithOwnKeys = settings_of({{"num_processes", "2"}, {"fsdp_version", "2"}, {"tessera_layout", "rows"}});

std::string in_lower_case(std::string text) {
  std::ranges::transform(text, text.begin(), [](unsigned char letter) { return std::tolower(letter); });
  return text;
}

class Accelerate : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    folder = new Folder;
    for (const auto& [name, settings] : kOurs) write_file(*folder / ("ours-" + name + ".yaml"), to_yaml(settings));
    write_file(*folder / "own.yaml", to_yaml(kWithOwnKeys));
    write_file(*folder / "ours-without.yaml", to_yaml(for_accelerate(kWithOwnKeys)));
    Process python({TESSERA_TEST_PYTHON, TESSERA_ROOT "/tests/python/accelerate_files.py", folder->path()}, {}, Process::Output::Capture);
    output = python.read_output();
    status = python.wait(std::chrono::seconds(60)).value_or(-1);
  }
  static void TearDownTestSuite() {
    delete folder;
    folder = nullptr;
  }
  void SetUp() override {
    if (status == 77) GTEST_SKIP() << "build/python has no package accelerate";
    ASSERT_EQ(status, 0) << output;
  }
  static Settings read(const std::string& name) {
    Settings settings;
    settings.read_file(*folder / name);
    settings.expect_consistent();
    return settings;
  }

  static inline Folder* folder = nullptr;
  static inline std::string output;
  static inline int status = -1;
};

TEST_F(Accelerate, WritesWhatIsRead) {
  const auto plain = read("theirs-default.yaml");
  EXPECT_EQ(plain.text("mixed_precision"), "bf16");
  EXPECT_EQ(plain.sharding_strategy(), "NO_SHARD");
  const auto one = read("theirs-one.yaml");
  EXPECT_EQ(one.sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(one.text("fsdp_transformer_layer_cls_to_wrap"), "BertLayer,T5Block");
  EXPECT_EQ(one.text("fsdp_backward_prefetch"), "BACKWARD_POST");
  EXPECT_EQ(one.text("fsdp_state_dict_type"), "FULL_STATE_DICT");
  EXPECT_EQ(one.text("mixed_precision"), "fp16");
  EXPECT_TRUE(one.is_true("fsdp_forward_prefetch"));
  EXPECT_TRUE(one.is_true("fsdp_activation_checkpointing"));
  EXPECT_EQ(one.integer("num_processes"), 4);
  EXPECT_THAT(one.remarks(), IsEmpty());
  const auto two = read("theirs-two.yaml");
  EXPECT_EQ(two.sharding_strategy(), "HYBRID_SHARD_ZERO2");
  EXPECT_EQ(two.integer("fsdp_min_num_params"), 1000);
  EXPECT_EQ(two.text("mixed_precision"), "no");
  EXPECT_TRUE(two.is_true("fsdp_offload_params"));
  EXPECT_THAT(two.remarks(), IsEmpty());
  const auto zero = read("theirs-deepspeed.yaml");
  EXPECT_EQ(zero.sharding_strategy(), "FULL_SHARD");
  EXPECT_EQ(zero.integer("gradient_accumulation_steps"), 2);
  EXPECT_TRUE(zero.is_true("fsdp_offload_params"));
}

TEST_F(Accelerate, ReadsWhatIsWritten) {
  for (const auto& [name, settings] : kOurs) {
    const auto again = read("again-" + name + ".yaml");
    for (const auto& key : config::keys()) EXPECT_EQ(again.text(key.name), settings.text(key.name)) << name << ": " << key.name;
  }
}

TEST_F(Accelerate, RefusesOurOwnSection) {
  EXPECT_THAT(read_file(*folder / "own-error"), HasSubstr("had unknown keys (['tessera_config'])"));
  const auto without = read("again-without.yaml");
  EXPECT_EQ(without.text("fsdp_version"), "2");
  EXPECT_FALSE(without.is_set("tessera_layout"));
}

TEST_F(Accelerate, GivesItsRanksTheSameVariables) {
  for (const auto* name : {"one", "two"}) {
    std::istringstream lines(read_file(*folder / (std::string("ranks-") + name)));
    std::map<std::string, std::string> theirs;
    for (std::string line; std::getline(lines, line);) theirs.emplace(line.substr(0, line.find('=')), line.substr(line.find('=') + 1));
    EXPECT_GT(theirs.size(), 10);
    for (const auto& [variable, value] : kOurs.at(name).environment()) {
      if (variable == "TESSERA_SETTINGS_FROM") continue;
      ASSERT_TRUE(theirs.contains(variable)) << variable;
      EXPECT_EQ(in_lower_case(theirs.at(variable)), in_lower_case(value)) << variable;
    }
  }
}

}  // namespace
}  // namespace tessera::testing::accelerate_test
