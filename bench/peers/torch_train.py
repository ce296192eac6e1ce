"""Measures training steps of PyTorch: in one process (single), or on ranks over gloo or NCCL (fsdp2, fsdp1, ddp). torchrun starts it."""
import contextlib
import os
import statistics
import sys
import time

import measure
import torch
import torch.distributed as dist
import workloads

options = measure.flags(["fsdp2", "fsdp1", "ddp", "single"])
narrow = options.dtype == "bf16"
dtype = torch.bfloat16 if narrow else torch.float32
mixed = narrow and not options.narrow_parameters
rank, world = workloads.rank_and_world()
on_device = options.device != "cpu"
device = torch.device(options.device, int(os.environ.get("LOCAL_RANK", "0")) if on_device else None)
if on_device:
    torch.accelerator.set_device_index(device.index)
if options.system != "single":
    dist.init_process_group("nccl" if on_device else "gloo")
torch.manual_seed(0)
sizes = {"heads": options.heads, "length": options.length} if options.model == "gpt" else {}
with device:
    model = whole = workloads.MODELS[options.model](options.width, options.layers, **sizes)
if narrow and not mixed:
    model.to(dtype)
if options.model == "gpt":
    model.set_start_values()
if options.lora:
    import peft

    peft.get_peft_model(model.model, peft.LoraConfig(r=8, target_modules="all-linear"))  # in place
if options.system == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": init_device_mesh(options.device, (world,))}
    if mixed:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in model.units:
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
    for module in model.modules() if mixed else []:  # PyTorch's batch norm takes no statistics wider than its weight here
        if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
            module.running_mean, module.running_var = module.running_mean.to(dtype), module.running_var.to(dtype)
elif options.system == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = set(model.units)
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if mixed else None
    model = FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(lambda module: module in units), mixed_precision=precision,
                                     device_id=device, use_orig_params=True)
elif options.system == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
autocast = mixed and options.system in ("ddp", "single")
generator = torch.Generator().manual_seed(1 + rank)


def draw():
    inputs, targets = whole.batch(options.batch or workloads.BATCH[options.model], generator)
    if narrow and not autocast and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    return inputs.to(device), targets.to(device)


def forward_and_backward(inputs, targets):
    with torch.autocast(options.device, torch.bfloat16) if autocast else contextlib.nullcontext():
        scores = model(inputs)
    loss = workloads.loss_of(scores, targets)
    loss.backward()
    return loss.detach()


def update():
    optimizer.step()
    optimizer.zero_grad()


def wait_for_all():
    if world > 1:
        dist.barrier()
    if on_device:
        torch.accelerator.synchronize()


times, passes, queued = [], [], []
for step in range(options.warmup + options.steps):
    batch = draw()
    if step == options.warmup and on_device:
        torch.accelerator.reset_peak_memory_stats()
    wait_for_all()
    begin = time.perf_counter()
    loss = forward_and_backward(*batch)
    passed = time.perf_counter()
    update()
    told = time.perf_counter()
    wait_for_all()
    if step >= options.warmup:
        times.append(time.perf_counter() - begin)
        passes.append(passed - begin)
        queued.append(told - begin)
    if step == 0 and rank == 0:
        print("first step done", file=sys.stderr, flush=True)
more = {"pass_ms": 1e3 * min(passes), "queued_ms": 1e3 * statistics.median(queued)}
if on_device:
    # Measures steps as in training, where the host does not wait for the device between steps.
    batches = [draw() for _ in range(options.steps)]
    wait_for_all()
    begin = time.perf_counter()
    for batch in batches:
        loss = forward_and_backward(*batch)
        update()
    wait_for_all()
    more.update(running_ms=1e3 * (time.perf_counter() - begin) / options.steps,
                peak_mb=torch.accelerator.max_memory_allocated() / 1e6, reserved_mb=torch.accelerator.max_memory_reserved() / 1e6)
memory = torch.tensor([measure.own_megabytes()], device=device)
if world > 1:
    dist.all_reduce(memory)
if rank == 0:
    measure.row(options, world, times, memory.item(), loss.item(), **more)
if options.system != "single":
    dist.destroy_process_group()
