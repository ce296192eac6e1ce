"""Saves and loads the checkpoint of bench/checkpoint_ranks.cpp by torch.distributed.checkpoint. torchrun starts it."""
import argparse
import json
import os
import shutil
import time

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--layers", type=int, default=24)
options = parser.parse_args()
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
model = torch.nn.Sequential(*[torch.nn.Linear(options.width, options.width) for _ in range(options.layers)])
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
model(torch.randn(4, options.width)).sum().backward()
optimizer.step()
optimizer.zero_grad()


def seconds(act):
    dist.barrier()
    begin = time.perf_counter()
    act()
    own = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(own, op=dist.ReduceOp.MAX)
    return own.item()


def fastest(folder, act):
    took = []
    for _ in range(3):
        if rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
        os.sync()
        took.append(seconds(act))
    return min(took)


def report(operation, took):
    count = 12 * options.layers * (options.width**2 + options.width)
    if rank == 0:
        print(json.dumps({"system": "dcp", "operation": operation, "world": world, "bytes": count, "s": took}), flush=True)


def state():
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def load():
    held = state()
    dcp.load(held, checkpoint_id=os.path.join(options.folder, "dcp"))
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])


target = os.path.join(options.folder, "dcp")
report("save", fastest(target, lambda: dcp.save(state(), storage_writer=dcp.FileSystemWriter(target, sync_files=True))))
report("load", seconds(load))
pending = []
wait = lambda: pending.pop().result()
start = lambda: pending.append(dcp.async_save(state(), checkpoint_id=os.path.join(options.folder, "async")))
both = time.perf_counter()
report("its pause", seconds(start))
wait()
dist.barrier()
report("async save", time.perf_counter() - both)
dist.destroy_process_group()
