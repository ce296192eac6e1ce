// Configurations of Accelerate and DeepSpeed.
#include <cstdlib>

#include "fuzz.h"
#include "tessera/config/settings.h"

namespace tessera::fuzz {
namespace {

void read_configuration(std::span<const uint8_t> data) {
  const auto file = folder() + "/c.yaml";
  write_file(file, data);
  expect_own_errors([&] {
    config::Settings settings;
    settings.read_file(file);
    settings.expect_consistent();
    settings.sharding_strategy();
    // What we write is read again, as the same.
    const auto text = config::to_yaml(settings);
    write_file(file, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    config::Settings again;
    again.read_file(file);
    if (config::to_yaml(again) != text) std::abort();
  });
}

std::vector<std::string> seeds_of_configuration() {
  return {
      "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 1\n  fsdp_sharding_strategy: 4\nmixed_precision: bf16\nnum_processes: 2\n",
      "fsdp_config:\nfsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\nfsdp_transformer_layer_cls_to_wrap: [A, 'it''s']\ntpu_env: []\n",
      R"({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "bf16": {"enabled": true}, "train_batch_size": "auto"})",
      "distributed_type: DEEPSPEED\ndeepspeed_config: {zero_stage: 2, deepspeed_config_file: none}\nnum_processes: -1\n",
      "a: &a [*a]\n",
      "? [x]\n: y\n",
      "debug: !!binary x\n",
      std::string(50'000, '['),
      std::string(50'000, '{'),
      "main_training_function: \"\\u0085\\x1b\"\n",
      "",
  };
}

const Target target_configuration("configuration", read_configuration, seeds_of_configuration);

}  // namespace
}  // namespace tessera::fuzz
