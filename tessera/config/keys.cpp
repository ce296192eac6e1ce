#include "tessera/config/keys.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <utility>

#include "tessera/base/env_table.h"
#include "tessera/base/words.h"

namespace tessera::config {
namespace {

constexpr auto kPods = "Tessera starts no TPU pods; run `tessera launch` on each machine";
constexpr auto kSharded = "Tessera divides data and parameters among ranks, not the operators of a layer";
constexpr auto kUncut = "sequences are never divided among ranks";
constexpr auto kCompiler = "C++ modules can't be compiled by torch.compile";
constexpr auto kUncompiled = "nothing is compiled";

Key refused(std::string_view name, std::string_view otherwise, std::string_view reason, std::string variable = {}) {
  return {.name = name, .otherwise = otherwise, .variable = std::move(variable), .reason = reason, .effect = Effect::Refused};
}

Key ignored(std::string_view name, std::string_view otherwise, std::string_view reason, std::string variable = {}) {
  return {.name = name, .otherwise = otherwise, .variable = std::move(variable), .reason = reason, .effect = Effect::None};
}

Key written(Key key) {
  key.is_written = true;
  return key;
}

Key of_version_1(Key key) {
  key.is_of_version_1 = true;
  return key;
}

Key between(int64_t least, int64_t most, Key key) {
  key.least = least;
  key.most = most;
  return key;
}

Key of(Call call, Key key) {
  key.call = call;
  return key;
}

/// The table of keys: name, default, meaning, question, choices, and more. completed() adds the members that follow from these.
std::vector<Key> table() {
  constexpr int64_t kMostRanks = 65'536;
  return {
      written({.name = "compute_environment",
               .otherwise = "LOCAL_MACHINE",
               .choices = {"LOCAL_MACHINE"},
               .reason = "Tessera starts no jobs of SageMaker; run `tessera launch` in the container",
               .refused = "AMAZON_SAGEMAKER",
               .effect = Effect::Refused}),
      written({.name = "distributed_type",
               .otherwise = "FSDP",
               .meaning = "FSDP shards the model; with MULTI_CPU, MULTI_GPU, XLA and NO each rank keeps all of it, with XLA on the devices "
                          "of a PJRT plugin",
               .question = "Which type of machine are you using?",
               .choices = {"NO", "MULTI_CPU", "MULTI_GPU", "XLA", "FSDP"},
               .variable = "ACCELERATE_USE_FSDP",
               .answer = "MULTI_CPU",
               .labels = {"No distributed training", "multi-CPU", "multi-GPU", "XLA devices, such as TPUs"},
               .reason = "Tessera has FSDP and data parallelism; of DeepSpeed it reads configurations, and shards by FSDP"}),
      written(of(Call::Init, {.name = "use_cpu",
                              .otherwise = "false",
                              .meaning = "ranks train on the CPU, whatever TESSERA_DEVICE says",
                              .question = "Do you want to train on the CPU even if there is a GPU?",
                              .variable = "ACCELERATE_USE_CPU",
                              .contradicts = {{"true", "distributed_type", "MULTI_GPU"},
                                              {"true", "distributed_type", "XLA"},
                                              {"true", "fsdp_offload_params", "true"},
                                              {"true", "tessera_offload", "host"}}})),
      written({.name = "num_machines",
               .otherwise = "1",
               .meaning = "how many machines take part",
               .question = "How many different machines will you use?",
               .flag = "--nnodes",
               .least = 1,
               .most = kMostRanks}),
      written({.name = "machine_rank",
               .otherwise = "0",
               .meaning = "the number of this machine, counted from 0",
               .question = "What is the rank of this machine, counted from 0?",
               .flag = "--node-rank"}),
      written(between(1, kNoLimit,
                      {"num_processes", "1", "how many ranks there are on all machines together",
                       "How many ranks shall there be on all machines together?"})),
      {.name = "main_process_ip",
       .otherwise = "",
       .meaning = "the address of machine 0, where ranks meet",
       .question = "What is the IP address of machine 0?",
       .flag = "--master-addr"},
      {.name = "main_process_port",
       .otherwise = "0",
       .meaning = "the port on machine 0 where ranks meet; 0 takes a free one on one machine, and 29500 on several",
       .question = "What is the port on machine 0 at which ranks meet?",
       .flag = "--master-port",
       .answer = "29500",
       .most = 65'535},
      {"gpu_ids", "all", "the GPUs of this machine that ranks see in CUDA_VISIBLE_DEVICES: numbers with commas between them, or all",
       "Which GPUs of this machine? Numbers with commas between, or all"},
      written({"enable_cpu_affinity", "false", "binds each rank to its own processor cores",
               "Shall each rank be bound to its own processor cores?"}),
      written({.name = "mixed_precision",
               .otherwise = "no",
               .meaning = "the dtype in which parameters are gathered and used, and gradients are sent",
               .question = "Do you wish to use mixed precision?",
               .choices = {"no", "fp16", "bf16"},
               .variable = "ACCELERATE_MIXED_PRECISION",
               .reason = "libtorch has no fp8 training in C++",
               .refused = "fp8"}),
      {.name = "gradient_accumulation_steps",
       .otherwise = "1",
       .meaning = "over how many batches gradients are summed before a step",
       .variable = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS",
       .least = 1,
       .is_of_deepspeed = true},
      {.name = "gradient_clipping",
       .otherwise = "0",
       .meaning = "the greatest norm of all gradients; 0 is no limit",
       .variable = "ACCELERATE_GRADIENT_CLIPPING",
       .kind = Kind::Number,
       .is_of_deepspeed = true},

      written({.name = "fsdp_version",
               .otherwise = "1",
               .meaning = "which of PyTorch's two FSDPs the keys are meant for; with 1, mixed_precision also casts buffers",
               .question = "What should be your FSDP version?",
               .choices = {"1", "2"},
               .answer = "2"}),
      of_version_1({"fsdp_sharding_strategy",
                    "FULL_SHARD",
                    "what is divided among which ranks",
                    "What should be your sharding strategy?",
                    {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"}}),
      {"fsdp_reshard_after_forward",
       "true",
       "whether parameters are sharded again after forward; with fsdp_version 1, the name of a sharding strategy",
       "Do you want to reshard parameters after forward?",
       {"FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "true", "false"}},
      {"fsdp_offload_params", "false",
       "keeps shards and gradients in the memory of the host; refused for ranks on CPUs, which have them there already",
       "Do you want to keep parameters and gradients in host memory?"},
      {.name = "fsdp_auto_wrap_policy",
       .otherwise = "NO_WRAP",
       .meaning = "which modules become units",
       .question = "What should be your auto wrap policy?",
       .choices = {"TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"},
       .answer = "TRANSFORMER_BASED_WRAP"},
      {.name = "fsdp_transformer_layer_cls_to_wrap",
       .otherwise = "",
       .meaning = "the classes whose modules become units, with commas between them: BertLayer,T5Block",
       .question = "Which classes become units? With commas between, such as BertLayer,T5Block",
       .variable = "FSDP_TRANSFORMER_CLS_TO_WRAP",
       .needs = {{"fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"}}},
      {.name = "fsdp_min_num_params",
       .otherwise = "100000000",
       .meaning = "how many parameters a module of SIZE_BASED_WRAP must have to become a unit",
       .question = "How many parameters must a unit have at least?",
       .answer = "1e8"},
      of_version_1({.name = "fsdp_backward_prefetch",
                    .otherwise = "BACKWARD_PRE",
                    .meaning = "when backward gathers the unit that it needs next",
                    .question = "What should be your backward prefetch policy?",
                    .choices = {"BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"},
                    .flag = "--fsdp-backward-prefetch-policy"}),
      of_version_1({.name = "fsdp_forward_prefetch",
                    .otherwise = "true",
                    .meaning = "gathers the next unit of forward while the present one computes",
                    .question = "Do you want to gather the next unit already in forward?",
                    .answer = "no"}),
      of_version_1(of(Call::Shard, {"fsdp_use_orig_params", "true",
                                    "whether the optimizer gets each parameter under its name; with false it gets one flat parameter",
                                    "Shall parameters keep their names?"})),
      {.name = "fsdp_cpu_ram_efficient_loading",
       .otherwise = "false",
       .meaning = "only rank 0 needs the values of the model before it is sharded",
       .question = "Shall only rank 0 load the values of the model?",
       .answer = "yes",
       .needs = {{"fsdp_sync_module_states", "true"}}},
      of_version_1({"fsdp_sync_module_states", "true", "all ranks begin with the parameters and buffers of rank 0",
                    "Shall all ranks begin with the parameters of rank 0?"}),
      {"fsdp_activation_checkpointing", "false", "frees the activations of units, and computes them again in backward",
       "Do you want to enable activation checkpointing?"},
      {"fsdp_state_dict_type",
       "SHARDED_STATE_DICT",
       "if given, checkpoints are saved in this layout of Accelerate; LOCAL_STATE_DICT is Tessera's own format",
       "What should be your state dict type?",
       {"FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"}},
      of(Call::Shard, {"fsdp_ignored_modules", "", "a regular expression for the names of modules that are not sharded"}),

      of(Call::Shard,
         {.name = "tessera_residence",
          .otherwise = "auto",
          .meaning = "where unsharded parameters are kept: shared by the ranks of a host, where that is possible, or gathered by each rank",
          .choices = {"auto", "gathered", "node-shared"},
          .contradicts = {{"node-shared", "fsdp_offload_params", "true"}, {"node-shared", "tessera_offload"}}}),
      of(Call::Shard, {.name = "tessera_layout",
                       .otherwise = "auto",
                       .meaning = "how the parameters of a unit are divided: as one flat buffer, each by its rows, or each to one rank",
                       .choices = {"auto", "flat", "rows", "whole-parameters"},
                       .contradicts = {{"rows", "fsdp_use_orig_params", "false"}, {"whole-parameters", "fsdp_use_orig_params", "false"}}}),
      of(Call::Shard,
         {.name = "tessera_codec",
          .otherwise = "none",
          .meaning = "the form in which parameters are sent and computed with; unlike mixed_precision, gradients are sent as they are",
          .choices = {"none", "bf16"},
          .contradicts = {{"bf16", "mixed_precision"}}}),
      of(Call::Shard, {"tessera_grad_dtype",
                       "no",
                       "the dtype of the gradients of shards, if it is wider than that of the shards",
                       {},
                       {"no", "fp32", "fp64"}}),
      of(Call::Shard, between(0, kMostRanks,
                              {"tessera_reshard_ranks", "0",
                               "after forward, units are divided among so many consecutive ranks, which keep one copy; 0 is all ranks"})),
      of(Call::Shard, between(0, kMostRanks,
                              {"tessera_prefetch_depth", "0",
                               "how many units ahead are gathered; 0 leaves it to the transport: 1, or none on XLA devices"})),
      of(Call::Shard,
         between(1, kMostRanks,
                 {"tessera_max_live_units", "2", "how many units may be unsharded at once; with 1 nothing is gathered ahead"})),
      {"tessera_limit_all_gathers", "true", "whether units that are gathered ahead count for tessera_max_live_units"},
      {"tessera_unused_parameters",
       "refuse",
       "what becomes of parameters that only some ranks have used in a backward pass: an error, or zeros for their gradients",
       {},
       {"refuse", "zeros"}},
      of(Call::Adapt, {"tessera_quantisation",
                       "no",
                       "the form in which the weights of all linear layers but the output layer are kept, frozen",
                       {},
                       {"no", "nf4", "nf4_single", "int8", "fp8"}}),
      of(Call::Adapt,
         between(0, 1'000'000, {"tessera_lora_r", "0", "the rank of the adapters that train in place of the weights; 0 adds no adapters"})),
      of(Call::Adapt, {.name = "tessera_lora_alpha",
                       .otherwise = "16",
                       .meaning = "what adapters add is multiplied by this and divided by the rank",
                       .kind = Kind::Number}),
      of(Call::Adapt, {.name = "tessera_lora_dropout",
                       .otherwise = "0",
                       .meaning = "the dropout of the inputs of adapters; less than 1",
                       .kind = Kind::Number,
                       .most = 1}),
      of(Call::Adapt,
         {"tessera_lora_rslora", "false", "whether what adapters add is divided by the square root of the rank in place of the rank"}),
      of(Call::Adapt,
         {"tessera_lora_dora", "false", "whether adapters are DoRA: the size of each row of a weight trains apart from its direction"}),
      of(Call::Adapt, {"tessera_lora_target_modules", "",
                       "the layers that get adapters, by the ends of their names, with commas between them: q_proj,v_proj; all linear "
                       "layers but the output layer unless given"}),
      of(Call::Adapt, {"tessera_lora_modules_to_save", "",
                       "modules that train as a whole, besides adapters, with commas between their names, such as a new classifier"}),
      of(Call::Adapt, {"tessera_lora_bias",
                       "none",
                       "which biases train, besides adapters: none, all of the model, or those of layers with adapters",
                       {},
                       {"none", "all", "lora_only"}}),
      of(Call::Shard,
         {.name = "tessera_offload",
          .otherwise = "none",
          .meaning = "where shards and gradients are kept between their uses: host is for ranks on devices, and disk for those on CPUs",
          .choices = {"none", "host", "disk"},
          .contradicts = {{"none", "fsdp_offload_params", "true"}, {"disk", "fsdp_offload_params", "true"}}}),
      {.name = "tessera_activation_offload",
       .otherwise = "none",
       .meaning = "where the tensors that activation checkpointing keeps are until backward: host is for ranks on devices, and disk for those on CPUs",
       .choices = {"none", "host", "disk"},
       .needs = {{"distributed_type", "FSDP"}, {"fsdp_activation_checkpointing", "true"}}},
      of(Call::Shard,
         {"tessera_offload_folder", "",
          "where the files of tessera_offload and tessera_activation_offload are; the folder for temporary files unless given"}),
      {.name = "tessera_activation_keep",
       .otherwise = "",
       .meaning =
           "operators whose results activation checkpointing keeps, so that they run once, with commas between them: aten::mm,aten::addmm",
       .needs = {{"distributed_type", "FSDP"}, {"fsdp_activation_checkpointing", "true"}}},
      of(Call::Init, {"tessera_transport", "auto", "what ranks talk over, such as shm or gloo; `tessera env` lists all"}),
      {"tessera_checkpoint_format",
       "tessera",
       "the format that Trainer::save_state writes; accelerate also if fsdp_state_dict_type is given and names one of its layouts",
       {},
       {"tessera", "accelerate"}},
      {"tessera_log_with", "",
       "where Trainer::log writes: FILE.jsonl, FOLDER/ for TensorBoard, mlflow:FOLDER, prometheus:PORT, with commas between them; none for nowhere"},

      between(1, kMostRanks,
              {"parallelism_config_dp_replicate_size", "1", "how many copies of the model there are", "How many copies shall there be?"}),
      between(1, kMostRanks,
              {"parallelism_config_dp_shard_size", "1", "how many ranks share one copy", "How many ranks shall share a copy?"}),

      written(refused("downcast_bf16", "no", "it is a setting of TPUs only; use mixed_precision: bf16")),
      refused("tpu_name", "", kPods),
      refused("tpu_zone", "", kPods),
      refused("tpu_vm", "", kPods),
      written(refused("tpu_env", "", kPods)),
      refused("tpu_use_cluster", "false", kPods),
      refused("tpu_use_sudo", "false", kPods),
      refused("command_file", "", kPods),
      refused("commands", "", kPods),
      refused("fp8_config", "", "libtorch has no fp8 training in C++"),
      refused("megatron_lm_config", "", "Megatron-LM is a Python library; use FSDP"),
      refused("mpirun_config", "", "Tessera does not start mpirun; run `mpirun -n N PROGRAM` yourself"),
      refused("parallelism_config_tp_size", "1", kSharded, "PARALLELISM_CONFIG_TP_SIZE"),
      refused("parallelism_config_cp_size", "1", kUncut, "PARALLELISM_CONFIG_CP_SIZE"),
      refused("parallelism_config_sp_size", "1", kUncut, "PARALLELISM_CONFIG_SP_SIZE"),
      refused("dynamo_backend", "no", kCompiler, "ACCELERATE_DYNAMO_BACKEND"),
      written(ignored("same_network", "true", "ranks meet at main_process_ip in any case")),
      written(ignored("rdzv_backend", "static", "ranks meet in Tessera's own store in any case")),
      written(ignored("debug", "false", "ranks always compare their operations", "ACCELERATE_DEBUG_MODE")),
      written(ignored("main_training_function", "main", "ranks run a program, whose function is main")),
      ignored("parallelism_config_cp_backend", "torch", kUncut),
      ignored("parallelism_config_cp_comm_strategy", "allgather", kUncut),
      ignored("parallelism_config_sp_backend", "deepspeed", kUncut),
      ignored("parallelism_config_sp_seq_length", "", kUncut),
      ignored("parallelism_config_sp_seq_length_is_variable", "true", kUncut),
      ignored("parallelism_config_sp_attn_implementation", "", kUncut),
      ignored("dynamo_mode", "default", kUncompiled),
      ignored("dynamo_use_fullgraph", "false", kUncompiled),
      ignored("dynamo_use_dynamic", "false", kUncompiled),
      ignored("dynamo_use_regional_compilation", "false", kUncompiled),
  };
}

struct SectionNames {
  std::string_view name, prefix;
};

/// Names of sections and prefixes of their keys, in the order of Section.
constexpr std::array<SectionNames, 5> kNames = {{{"", ""},
                                                 {"fsdp_config", "fsdp_"},
                                                 {"tessera_config", "tessera_"},
                                                 {"parallelism_config", "parallelism_config_"},
                                                 {"dynamo_config", "dynamo_"}}};

Key completed(Key key) {
  for (const auto section : kSections) {
    if (key.name.starts_with(section_prefix(section))) key.section = section;
  }
  if (!key.choices.empty()) {
    key.kind = Kind::Choice;
  } else if (key.otherwise == "true" || key.otherwise == "false") {
    key.kind = Kind::Bool;
  } else if (key.kind == Kind::Text && key.otherwise.find_first_of("0123456789") == 0) {
    key.kind = Kind::Integer;
  }
  if (key.section != Section::Top && key.variable.empty() && has_effect(key)) key.variable = upper(key.name);
  return key;
}

const AddedEnv added_env([] {
  constexpr auto kMeaning = "the key of a [configuration](../configuration.md) with this name in small letters";
  std::vector<EnvVariable> all;
  for (const auto& key : keys()) all.push_back({key.variable, "those of the key", kMeaning, "`Trainer`"});
  return all;
}());

}  // namespace

std::span<const Key> keys() {
  // Never destroyed, because the table of environment variables refers to the keys.
  static const auto& all = *new auto([] {
    auto rows = table();
    for (auto& key : rows) key = completed(std::move(key));
    return rows;
  }());
  return all;
}

// Accelerate ignores this older name in silence.
std::string_view todays_name(std::string_view name) {
  return name == "fsdp_backward_prefetch_policy" ? "fsdp_backward_prefetch" : name;
}

const Key* find_key(std::string_view name) {
  const auto found = std::ranges::find(keys(), todays_name(name), &Key::name);
  return found == keys().end() ? nullptr : &*found;
}

std::string_view section_name(Section section) {
  return kNames.at(static_cast<size_t>(section)).name;
}

std::string_view section_prefix(Section section) {
  return kNames.at(static_cast<size_t>(section)).prefix;
}

/// Returns the key whose name is the prefix of a section followed by this name; null if there is none.
static const Key* find_without_prefix(std::string_view name) {
  for (const auto section : kSections) {
    if (const auto* key = find_key(fmt::format("{}{}", section_prefix(section), name))) return key;
  }
  return nullptr;
}

std::string places_of(std::string_view name) {
  if (const auto* key = find_key(name)) {
    const auto section = section_name(key->section);
    return section.empty() ? fmt::format(" here ({} belongs at the top of the file)", key->name)
                           : fmt::format(" here ({} belongs under {})", key->name, section);
  }
  const auto* key = find_without_prefix(name);
  return key == nullptr ? std::string() : places_of(key->name);
}

std::string suggestion(std::string_view name) {
  std::vector<std::string> known;
  for (const auto& key : keys()) known.emplace_back(key.name);
  const auto* key = find_without_prefix(name);
  const auto nearest = key == nullptr ? nearest_name(name, known) : std::string(key->name);
  return nearest.empty() ? std::string() : fmt::format(" (did you mean {}?)", nearest);
}

}  // namespace tessera::config
