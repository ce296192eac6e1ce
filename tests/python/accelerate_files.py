"""accelerate_files.py FOLDER: for tessera/config/accelerate_test.cpp. Writes configurations with Accelerate's own code to FOLDER/theirs-*.yaml, reads each
FOLDER/ours-NAME.yaml with its own reader, writes it again as FOLDER/again-NAME.yaml, and what its launcher would give the ranks as FOLDER/ranks-NAME.
What its reader says of FOLDER/own.yaml, which has keys of Tessera's own, becomes FOLDER/own-error. Ends with status 77 if there is no package accelerate.
"""
import os
import pathlib
import sys

try:
    from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
    from accelerate.commands.config.default import write_basic_config
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env
except ImportError:
    sys.exit(77)

folder = pathlib.Path(sys.argv[1])

write_basic_config(mixed_precision="bf16", save_location=str(folder / "theirs-default.yaml"))

MACHINE = {
    "compute_environment": "LOCAL_MACHINE", "use_cpu": False, "debug": False, "num_processes": 4, "machine_rank": 0, "num_machines": 1,
    "rdzv_backend": "static", "same_network": True, "main_training_function": "main", "downcast_bf16": "no", "tpu_env": [],
    "tpu_use_cluster": False, "tpu_use_sudo": False,
}
VERSION_1 = {
    "fsdp_version": 1, "fsdp_reshard_after_forward": "SHARD_GRAD_OP", "fsdp_offload_params": False,
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_transformer_layer_cls_to_wrap": "BertLayer,T5Block",
    "fsdp_backward_prefetch": "BACKWARD_POST", "fsdp_state_dict_type": "FULL_STATE_DICT", "fsdp_forward_prefetch": True,
    "fsdp_use_orig_params": True, "fsdp_cpu_ram_efficient_loading": True, "fsdp_sync_module_states": True,
    "fsdp_activation_checkpointing": True,
}
VERSION_2 = {
    "fsdp_version": 2, "fsdp_reshard_after_forward": False, "fsdp_offload_params": True, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
    "fsdp_min_num_params": 1000, "fsdp_state_dict_type": "SHARDED_STATE_DICT", "fsdp_cpu_ram_efficient_loading": False,
    "fsdp_activation_checkpointing": False,
}
SIZES = {"parallelism_config_dp_replicate_size": 2, "parallelism_config_dp_shard_size": 2, "parallelism_config_tp_size": 1,
         "parallelism_config_cp_size": 1}
ClusterConfig(**MACHINE, distributed_type="FSDP", mixed_precision="fp16", fsdp_config=VERSION_1).to_yaml_file(folder / "theirs-one.yaml")
ClusterConfig(**MACHINE, distributed_type="FSDP", mixed_precision="no", fsdp_config=VERSION_2, parallelism_config=SIZES).to_yaml_file(
    folder / "theirs-two.yaml")
ClusterConfig(**MACHINE, distributed_type="DEEPSPEED", mixed_precision="bf16", deepspeed_config={
    "zero_stage": 3, "gradient_accumulation_steps": 2, "offload_optimizer_device": "none", "offload_param_device": "cpu",
    "zero3_init_flag": False}).to_yaml_file(folder / "theirs-deepspeed.yaml")

try:
    load_config_from_file(str(folder / "own.yaml"))
except ValueError as error:
    (folder / "own-error").write_text(str(error))

for ours in sorted(folder.glob("ours-*.yaml")):
    name = ours.stem.removeprefix("ours-")
    config = load_config_from_file(str(ours))
    config.to_yaml_file(folder / f"again-{name}.yaml")
    args, _, _ = _validate_launch_command(launch_command_parser().parse_args(["--config_file", str(ours), "program"]))
    args.main_process_port = 0
    before = dict(os.environ)
    given = {key: value for key, value in prepare_multi_gpu_env(args).items() if before.get(key) != value}
    (folder / f"ranks-{name}").write_text("".join(f"{key}={value}\n" for key, value in given.items()))
