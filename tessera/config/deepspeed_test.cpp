// Reading configurations of DeepSpeed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "tessera/base/error.h"
#include "tessera/config/settings.h"
#include "tests/testing/folder.h"

namespace tessera::testing::deepspeed_test {
namespace {

using config::Settings;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class DeepSpeed : public ::testing::Test {
 protected:
  Settings read(const std::string& text, const std::string& name = "ds.json") const {
    write_file(folder_ / name, text);
    Settings settings;
    settings.read_file(folder_ / name);
    settings.expect_consistent();
    return settings;
  }
  std::string error(const std::string& text) const {
    try {
      read(text);
    } catch (const ConfigError& error) {
      return error.what();
    }
    return "no error came";
  }

  Folder folder_;
};

TEST_F(DeepSpeed, StagesAreStrategies) {
  const auto strategy = [&](const std::string& zero) {
    const auto settings = read(R"({"train_batch_size": 8, "zero_optimization": {)" + zero + "}}");
    EXPECT_EQ(settings.text("distributed_type"), "FSDP");
    return settings.sharding_strategy();
  };
  EXPECT_EQ(strategy(R"("stage": 3)"), "FULL_SHARD");
  EXPECT_EQ(strategy(R"("stage": 2)"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy(R"("stage": 1)"), "SHARD_GRAD_OP");
  EXPECT_EQ(strategy(R"("stage": 0)"), "NO_SHARD");
  EXPECT_EQ(strategy(""), "NO_SHARD");
  EXPECT_EQ(strategy(R"("stage": 3, "zero_hpz_partition_size": 8)"), "HYBRID_SHARD");
  EXPECT_THAT(error(R"({"zero_optimization": {"stage": 4}})"), HasSubstr("ds.json:1: the stage '4' of ZeRO is not 0, 1, 2 or 3"));
  EXPECT_THAT(error(R"({"zero_optimization": {"stage": 2, "zero_hpz_partition_size": 8}})"), HasSubstr("needs stage 3"));
}

TEST_F(DeepSpeed, WhatHasNoCounterpartIsARemark) {
  const auto settings = read(R"({
    "bf16": {"enabled": true},
    "fp16": {"enabled": false, "loss_scale": 0},
    "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0,
    "steps_per_print": 10,
    "train_micro_batch_size_per_gpu": "auto",
    "zero_optimization": {
      "stage": 3,
      "overlap_comm": true,
      "offload_param": {"device": "cpu", "pin_memory": true}
    }
  })");
  EXPECT_EQ(settings.text("mixed_precision"), "bf16");
  EXPECT_EQ(settings.integer("gradient_accumulation_steps"), 4);
  EXPECT_EQ(settings.number("gradient_clipping"), 1);
  EXPECT_TRUE(settings.is_true("fsdp_offload_params"));
  EXPECT_THAT(settings.setting("fsdp_offload_params").where, HasSubstr("ds.json:11"));
  EXPECT_EQ(settings.remarks().size(), 6);
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("ds.json:9: stage 3 of ZeRO becomes FULL_SHARD")));
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("ds.json:6: steps_per_print of DeepSpeed has no counterpart here")));
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("ds.json:7: train_micro_batch_size_per_gpu auto is left to the program")));
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("zero_optimization.overlap_comm of DeepSpeed")));
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("zero_optimization.offload_param.pin_memory of DeepSpeed")));
  EXPECT_THAT(settings.remarks(), Contains(HasSubstr("fp16.loss_scale of DeepSpeed")));
  EXPECT_THAT(error(R"({"bf16": {"enabled": true}, "fp16": {"enabled": true}})"), HasSubstr("both fp16 and bf16"));
}

TEST_F(DeepSpeed, MayBeASectionOfAccelerate) {
  const auto settings = read(R"(distributed_type: DEEPSPEED
deepspeed_config:
  gradient_accumulation_steps: 2
  offload_optimizer_device: none
  offload_param_device: none
  zero3_init_flag: false
  zero_stage: 3
mixed_precision: fp16
num_processes: 2
)",
                             "c.yaml");
  EXPECT_EQ(settings.sharding_strategy(), "FULL_SHARD");
  EXPECT_EQ(settings.integer("gradient_accumulation_steps"), 2);
  EXPECT_EQ(settings.text("mixed_precision"), "fp16");
  EXPECT_THAT(settings.remarks(), ElementsAre(HasSubstr("c.yaml:7: stage 3 of ZeRO becomes FULL_SHARD")));
}

TEST_F(DeepSpeed, MayBeAFileThatAccelerateNames) {
  const auto file = folder_ / "zero.json";
  write_file(file, R"({"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}})");
  const auto settings = read("distributed_type: DEEPSPEED\ndeepspeed_config:\n  deepspeed_config_file: " + file.string() + "\n", "c.yaml");
  EXPECT_EQ(settings.sharding_strategy(), "SHARD_GRAD_OP");
  EXPECT_EQ(settings.text("mixed_precision"), "bf16");
  EXPECT_THAT(read("distributed_type: MULTI_CPU\ndeepspeed_config:\n  zero_stage: 3\n", "c.yaml").remarks(),
              Contains(HasSubstr("deepspeed_config has no effect")));
}

}  // namespace
}  // namespace tessera::testing::deepspeed_test
