// Configurations of Accelerate and DeepSpeed.
#include <cstdlib>

#include "fuzz.h"
#include "tessera/config/settings.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace tessera;
  const auto file = fuzz::folder() + "/c.yaml";
  fuzz::write_file(file, {data, size});
  fuzz::expect_own_errors([&] {
    config::Settings settings;
    settings.read_file(file);
    settings.expect_consistent();
    settings.sharding_strategy();
    // What we write is read again, as the same.
    const auto text = config::to_yaml(settings);
    fuzz::write_file(file, {reinterpret_cast<const uint8_t*>(text.data()), text.size()});
    config::Settings again;
    again.read_file(file);
    if (config::to_yaml(again) != text) std::abort();
  });
  return 0;
}

namespace tessera::fuzz {

std::vector<std::string> seeds() {
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

}  // namespace tessera::fuzz
