"""Training steps by PyTorch: one process (single), or ranks over gloo (fsdp2, fsdp1, ddp). Started by torchrun."""
import contextlib
import sys
import time

import measure
import torch
import torch.distributed as dist
import workloads

options = measure.flags(["fsdp2", "fsdp1", "ddp", "single"])
narrow = options.dtype == "bf16"
dtype = torch.bfloat16 if narrow else torch.float32
rank, world = workloads.rank_and_world()
if options.system != "single":
    dist.init_process_group("gloo")
torch.manual_seed(0)
model = whole = workloads.MODELS[options.model](options.width, options.layers)
if options.system == "fsdp2":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    settings = {"mesh": init_device_mesh("cpu", (world,))}
    if narrow:
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for unit in model.units:
        fully_shard(unit, **settings)
    fully_shard(model, **settings)
elif options.system == "fsdp1":
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import CustomPolicy

    units = set(model.units)
    precision = MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32) if narrow else None
    model = FullyShardedDataParallel(model, auto_wrap_policy=CustomPolicy(lambda module: module in units), mixed_precision=precision,
                                     device_id=torch.device("cpu"), use_orig_params=True)
elif options.system == "ddp":
    model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
autocast = narrow and options.system in ("ddp", "single")
generator = torch.Generator().manual_seed(1 + rank)
times = []
for step in range(options.warmup + options.steps):
    inputs, targets = whole.batch(options.batch or workloads.BATCH[options.model], generator)
    if narrow and not autocast and inputs.is_floating_point():
        inputs = inputs.to(dtype)
    if world > 1:
        dist.barrier()
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
        scores = model(inputs)
    loss = workloads.loss_of(scores, targets)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if world > 1:
        dist.barrier()
    if step >= options.warmup:
        times.append(time.perf_counter() - begin)
    if step == 0 and rank == 0:
        print("first step done", file=sys.stderr, flush=True)
memory = torch.tensor([workloads.own_megabytes()])
if world > 1:
    dist.all_reduce(memory)
if rank == 0:
    measure.row(options, world, times, memory.item(), loss.item())
if world > 1:
    dist.destroy_process_group()
