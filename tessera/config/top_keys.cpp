// The keys at the top of a file: machines, ranks, precision.
#include <array>

#include "tessera/config/key_tables.h"

namespace tessera::config {
namespace {

using enum Section;
using enum Kind;

constexpr std::array<std::string_view, 1> kEnvironments = {"LOCAL_MACHINE"};
constexpr std::array<std::string_view, 5> kDistributedTypes = {"NO", "MULTI_CPU", "MULTI_GPU", "XLA", "FSDP"};
constexpr std::array<std::string_view, 2> kRendezvous = {"static", "c10d"};
constexpr std::array<std::string_view, 3> kPrecisions = {"no", "fp16", "bf16"};
constexpr std::array<std::string_view, 1> kDowncasts = {"no"};

constexpr std::string_view kPods = "Tessera starts no TPU pods; run `tessera launch` on each machine";

constexpr std::array kTopKeys = {
    Key{.name = "compute_environment",
        .kind = Choice,
        .choices = kEnvironments,
        .otherwise = "LOCAL_MACHINE",
        .meaning = "where the ranks run",
        .refusal = "Tessera starts no jobs of SageMaker; run `tessera launch` in the container",
        .refused = "AMAZON_SAGEMAKER"},
    Key{.name = "distributed_type",
        .kind = Choice,
        .choices = kDistributedTypes,
        .otherwise = "FSDP",
        .variable = "ACCELERATE_USE_FSDP",
        .meaning = "FSDP shards the model; with MULTI_CPU, MULTI_GPU, XLA and NO each rank keeps all of it, with XLA on the devices of a PJRT plugin",
        .refusal = "Tessera has FSDP and data parallelism; of DeepSpeed it reads configurations, and shards by FSDP"},
    Key{.name = "use_cpu",
        .kind = Bool,
        .otherwise = "false",
        .variable = "ACCELERATE_USE_CPU",
        .meaning = "trains on the CPU even where there are GPUs, as all ranks do today"},
    Key{.name = "num_machines", .kind = Integer, .least = 1, .most = 65'536, .otherwise = "1", .meaning = "how many machines take part"},
    Key{.name = "machine_rank", .kind = Integer, .otherwise = "0", .meaning = "the number of this machine among them"},
    Key{.name = "num_processes",
        .kind = Integer,
        .least = 1,
        .otherwise = "1",
        .meaning = "how many ranks there are on all machines together"},
    Key{.name = "main_process_ip", .meaning = "the address of machine 0, where ranks meet"},
    Key{.name = "main_process_port",
        .kind = Integer,
        .most = 65'535,
        .otherwise = "0",
        .meaning = "the port there; 0 takes a free one on one machine, and 29500 on several"},
    Key{.name = "same_network",
        .kind = Bool,
        .otherwise = "true",
        .meaning = "whether all machines are in one network",
        .no_effect = "ranks meet at main_process_ip in any case"},
    Key{.name = "rdzv_backend",
        .kind = Choice,
        .choices = kRendezvous,
        .otherwise = "static",
        .meaning = "how ranks meet",
        .refusal = "ranks meet in Tessera's own store",
        .no_effect = "ranks meet in Tessera's own store in any case"},
    Key{.name = "gpu_ids",
        .otherwise = "all",
        .meaning = "the GPUs of this machine that ranks see in CUDA_VISIBLE_DEVICES: numbers with commas between them, or all"},
    Key{.name = "enable_cpu_affinity", .kind = Bool, .otherwise = "false", .meaning = "binds each rank to its own processor cores"},
    Key{.name = "debug",
        .kind = Bool,
        .otherwise = "false",
        .variable = "ACCELERATE_DEBUG_MODE",
        .meaning = "compares the operations of all ranks",
        .no_effect = "ranks always compare their operations"},
    Key{.name = "mixed_precision",
        .kind = Choice,
        .choices = kPrecisions,
        .otherwise = "no",
        .variable = "ACCELERATE_MIXED_PRECISION",
        .meaning = "the dtype in which parameters are gathered and used, and gradients are sent",
        .refusal = "libtorch has no fp8 training in C++",
        .refused = "fp8"},
    Key{.name = "downcast_bf16",
        .kind = Choice,
        .choices = kDowncasts,
        .otherwise = "no",
        .meaning = "what bf16 means on a TPU",
        .refusal = "it is a setting of TPUs only; use mixed_precision: bf16"},
    Key{.name = "gradient_accumulation_steps",
        .kind = Integer,
        .least = 1,
        .otherwise = "1",
        .variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
        .meaning = "over how many batches gradients are summed before a step"},
    Key{.name = "gradient_clipping",
        .kind = Number,
        .otherwise = "0",
        .variable = "ACCELERATE_GRADIENT_CLIPPING",
        .meaning = "the greatest norm of all gradients; 0 is any"},
    Key{.name = "main_training_function",
        .otherwise = "main",
        .meaning = "the function of a script that ranks run",
        .no_effect = "ranks run a program, whose function is main"},
    Key{.name = "tpu_name", .meaning = "the name of a TPU pod", .refusal = kPods},
    Key{.name = "tpu_zone", .meaning = "the zone of a TPU pod", .refusal = kPods},
    Key{.name = "tpu_vm", .meaning = "machines of a TPU pod", .refusal = kPods},
    Key{.name = "tpu_env", .meaning = "variables for a TPU pod", .refusal = kPods},
    Key{.name = "tpu_use_cluster", .kind = Bool, .otherwise = "false", .meaning = "whether to start a TPU pod", .refusal = kPods},
    Key{.name = "tpu_use_sudo", .kind = Bool, .otherwise = "false", .meaning = "whether a TPU pod needs sudo", .refusal = kPods},
    Key{.name = "command_file", .meaning = "commands that a TPU pod runs first", .refusal = kPods},
    Key{.name = "commands", .meaning = "commands that a TPU pod runs first", .refusal = kPods},
    Key{.name = "fp8_config", .meaning = "settings of fp8", .refusal = "libtorch has no fp8 training in C++"},
    Key{.name = "megatron_lm_config", .meaning = "settings of Megatron-LM", .refusal = "Megatron-LM is a Python library; use FSDP"},
    Key{.name = "mpirun_config",
        .meaning = "settings of mpirun",
        .refusal = "Tessera does not start mpirun; run `mpirun -n N PROGRAM` yourself"},
};

}  // namespace

std::span<const Key> top_keys() {
  return kTopKeys;
}

}  // namespace tessera::config
