"""Measures training steps of DeepSpeed's ZeRO stage 3 over gloo. torchrun starts it."""
import contextlib
import io
import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
import measure
import workloads

options = measure.flags(["deepspeed"])
with contextlib.redirect_stdout(io.StringIO()):
    import deepspeed
    import torch
    import torch.distributed as dist

    deepspeed.init_distributed(dist_backend="gloo")
    rank, world = workloads.rank_and_world()
    torch.manual_seed(0)
    model = workloads.MODELS[options.model](options.width, options.layers)
    narrow = options.dtype == "bf16"
    batch = options.batch or workloads.BATCH[options.model]
    engine, *_ = deepspeed.initialize(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True), config={
        "train_micro_batch_size_per_gpu": batch,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
        "bf16": {"enabled": narrow},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    })
    generator = torch.Generator().manual_seed(1 + rank)
    times = []
    for step in range(options.warmup + options.steps):
        inputs, targets = model.batch(batch, generator)
        if narrow and inputs.is_floating_point():
            inputs = inputs.to(torch.bfloat16)
        dist.barrier()
        begin = time.perf_counter()
        loss = workloads.loss_of(engine(inputs), targets)
        engine.backward(loss)
        engine.step()
        dist.barrier()
        if step >= options.warmup:
            times.append(time.perf_counter() - begin)
        if step == 0 and rank == 0:
            print("first step done", file=sys.stderr, flush=True)
    memory = torch.tensor([measure.own_megabytes()])
    dist.all_reduce(memory)
if rank == 0:
    measure.row(options, world, times, memory.item(), loss.item())
