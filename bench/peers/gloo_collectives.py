"""Measures the collectives of bench/collectives_ranks.cpp by torch.distributed over gloo. torchrun starts it."""
import json
import statistics
import time

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
for megabytes in (1, 16, 64):
    size = megabytes << 20
    numel = size // 4 // world * world
    whole, own = torch.ones(numel), torch.ones(numel // world)
    for operation, act, moved in (
        ("all_gather", lambda: dist.all_gather_into_tensor(whole, own), 2 * size),
        ("reduce_scatter", lambda: dist.reduce_scatter_tensor(own, whole), size + size / world),
        ("all_reduce", lambda: dist.all_reduce(whole), 2 * size),
    ):
        times = []
        for number in range(11):
            dist.barrier()
            begin = time.perf_counter()
            act()
            slowest = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            if number >= 2:
                times.append(slowest.item())
        took = statistics.median(times)
        if rank == 0:
            print(json.dumps({"system": "torch gloo", "operation": operation, "world": world, "bytes": size, "ms": 1e3 * took,
                              "gb_per_s": world * moved / took / 1e9}), flush=True)
dist.destroy_process_group()
