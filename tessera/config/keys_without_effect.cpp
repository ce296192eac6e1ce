// The keys of Accelerate that change nothing here: their default, and why other values are refused or have no effect.
#include "tessera/config/key_tables.h"

namespace tessera::config {
namespace {

constexpr auto kPods = "Tessera starts no TPU pods; run `tessera launch` on each machine";
constexpr auto kSharded = "Tessera divides data and parameters among ranks, not the operators of a layer";
constexpr auto kUncut = "sequences are never divided among ranks";
constexpr auto kCompiler = "C++ modules can't be compiled by torch.compile";
constexpr auto kUncompiled = "nothing is compiled";

struct Row {
  std::string_view name, otherwise, reason;
  const char* variable = "";
};

constexpr Row kRefused[] = {
    {"downcast_bf16", "no", "it is a setting of TPUs only; use mixed_precision: bf16"},
    {"tpu_name", "", kPods},
    {"tpu_zone", "", kPods},
    {"tpu_vm", "", kPods},
    {"tpu_env", "", kPods},
    {"tpu_use_cluster", "false", kPods},
    {"tpu_use_sudo", "false", kPods},
    {"command_file", "", kPods},
    {"commands", "", kPods},
    {"fp8_config", "", "libtorch has no fp8 training in C++"},
    {"megatron_lm_config", "", "Megatron-LM is a Python library; use FSDP"},
    {"mpirun_config", "", "Tessera does not start mpirun; run `mpirun -n N PROGRAM` yourself"},
    {"parallelism_config_tp_size", "1", kSharded, "PARALLELISM_CONFIG_TP_SIZE"},
    {"parallelism_config_cp_size", "1", kUncut, "PARALLELISM_CONFIG_CP_SIZE"},
    {"parallelism_config_sp_size", "1", kUncut, "PARALLELISM_CONFIG_SP_SIZE"},
    {"dynamo_backend", "no", kCompiler, "ACCELERATE_DYNAMO_BACKEND"},
};

constexpr Row kIgnored[] = {
    {"same_network", "true", "ranks meet at main_process_ip in any case"},
    {"rdzv_backend", "static", "ranks meet in Tessera's own store in any case"},
    {"debug", "false", "ranks always compare their operations", "ACCELERATE_DEBUG_MODE"},
    {"main_training_function", "main", "ranks run a program, whose function is main"},
    {"parallelism_config_cp_backend", "torch", kUncut},
    {"parallelism_config_cp_comm_strategy", "allgather", kUncut},
    {"parallelism_config_sp_backend", "deepspeed", kUncut},
    {"parallelism_config_sp_seq_length", "", kUncut},
    {"parallelism_config_sp_seq_length_is_variable", "true", kUncut},
    {"parallelism_config_sp_attn_implementation", "", kUncut},
    {"dynamo_mode", "default", kUncompiled},
    {"dynamo_use_fullgraph", "false", kUncompiled},
    {"dynamo_use_dynamic", "false", kUncompiled},
    {"dynamo_use_regional_compilation", "false", kUncompiled},
};

}  // namespace

std::vector<Key> keys_without_effect() {
  std::vector<Key> all;
  const auto add = [&](std::span<const Row> rows, Effect effect) {
    for (const auto& row : rows)
      all.push_back({.name = row.name, .otherwise = row.otherwise, .variable = row.variable, .reason = row.reason, .effect = effect});
  };
  add(kRefused, Effect::Refused);
  add(kIgnored, Effect::None);
  return all;
}

}  // namespace tessera::config
