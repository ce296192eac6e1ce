"""run_files.py FOLDER: reads the run that tessera/checkpoint/run_python_test.cpp has written to FOLDER/ours, takes a step of it, and writes a run of its own to
FOLDER/theirs: by an Accelerator, and by PyTorch's functions alone.

Two ranks are forked before anything else, because threads of torch do not survive a fork.
"""
import json
import os
import sys
import types
import warnings

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, get_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict import set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranks import fork_ranks
from values import flat, numbers

try:
    import accelerate
    from accelerate.state import AcceleratorState, PartialState
except ImportError:
    accelerate = None

warnings.simplefilter("ignore")
folder = sys.argv[1]
ours, theirs = f"{folder}/ours", f"{folder}/theirs"
os.makedirs(theirs)
KINDS = {"sharded": "SHARDED_STATE_DICT", "full": "FULL_STATE_DICT"}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def new_run(accelerator=None):
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    if accelerator is None:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.02)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    return (model, optimizer, scheduler) if accelerator is None else accelerator.prepare(model, optimizer, scheduler)


def train(model, optimizer, steps):
    for step in steps:
        model(numbers(3, 6) + 0.25 * step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def write_json(rank, path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    result = flat(weights, "", {}) | flat(state["state"], "optimizer", {})
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"tensors": result, "lr": optimizer.param_groups[0]["lr"], "betas": optimizer.param_groups[0]["betas"]}, file)


SCHEDULERS = {
    "LambdaLR": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda count: 1 / (1 + count)),
    "MultiplicativeLR": lambda optimizer: torch.optim.lr_scheduler.MultiplicativeLR(optimizer, lambda count: 0.9),
    "StepLR": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5),
    "CosineAnnealingLR": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100),
    "CyclicLR": lambda optimizer: torch.optim.lr_scheduler.CyclicLR(optimizer, 0.01, 0.1, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 10),
}


def new_groups(accelerator, scheduler="LambdaLR"):
    """Weights decay, biases do not."""
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([
        {"params": [parameter for name, parameter in named if name.endswith("weight")], "weight_decay": 0.1},
        {"params": [parameter for name, parameter in named if name.endswith("bias")], "weight_decay": 0.0},
    ], lr=0.05)
    return accelerator.prepare(model, optimizer, SCHEDULERS[scheduler](optimizer))


def decays_of(model, optimizer):
    names = {id(parameter): name.removeprefix("module.") for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: group["weight_decay"] for group in optimizer.param_groups for parameter in group["params"]}


def write_groups(rank, path, model, optimizer, scheduler):
    """What a step with a rate that is given makes of it."""
    decays = decays_of(model, optimizer)
    count = scheduler.scheduler.last_epoch
    for group in optimizer.optimizer.param_groups:
        group["lr"] = 0.05
    train(model, optimizer, [2])
    if isinstance(model, nn.parallel.DistributedDataParallel):
        model = model.module
    weights, state = get_state_dict(model, optimizer.optimizer)
    result = flat(weights, "", {}) | flat(state["state"], "optimizer", {})
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"tensors": result, "decays": decays, "count": count}, file)


def read_trainer(rank):
    """Folders of a Trainer go on here, whatever the class of the scheduler, and are saved again."""
    for kind in ("sharded", "full", "replicated"):
        for name in SCHEDULERS:
            accelerator = new_accelerator(kind)
            model, optimizer, scheduler = new_groups(accelerator, name)
            accelerator.load_state(f"{ours}/trainer_{kind}")
            assert scheduler.scheduler.last_epoch == 4, scheduler.state_dict()
            assert scheduler.get_last_lr() == [0.05, 0.05], scheduler.get_last_lr()
            if name != "LambdaLR":
                train(model, optimizer, [2])
                scheduler.step()
                assert scheduler.scheduler.last_epoch == 6, scheduler.state_dict()
                continue
            write_groups(rank, f"{folder}/read_trainer_{kind}.json", model, optimizer, scheduler)
            scheduler.step()
            assert abs(scheduler.get_last_lr()[0] - 0.05 / 7) < 1e-9, scheduler.get_last_lr()
            accelerator.save_state(f"{theirs}/trainer_{kind}_again")


def write_trainer(rank):
    for kind in ("sharded", "full", "replicated"):
        accelerator = new_accelerator(kind)
        model, optimizer, scheduler = new_groups(accelerator)
        for step in (0, 1):
            for group in optimizer.optimizer.param_groups:
                group["lr"] = 0.05
            train(model, optimizer, [step])
            scheduler.step()
        accelerator.save_state(f"{theirs}/trainer_{kind}")
        write_groups(rank, f"{theirs}/trainer_{kind}.json", model, optimizer, scheduler)


def new_accelerator(kind):
    """With FSDP, which Accelerate never chooses for CPUs, so it is told that it has. All else is Accelerate's own."""
    AcceleratorState._reset_state()
    if kind == "replicated":
        PartialState._shared_state["distributed_type"] = accelerate.DistributedType.MULTI_CPU
        return accelerate.Accelerator(cpu=True)
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type=KINDS[kind], auto_wrap_policy="NO_WRAP",
                                                       cpu_ram_efficient_loading=False)
    accelerator = accelerate.Accelerator(cpu=True, fsdp_plugin=plugin)
    PartialState._shared_state["distributed_type"] = accelerate.DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = accelerate.DistributedType.FSDP, plugin
    return accelerator


def read_ours(rank):
    """Each checkpoint goes on for a step here."""
    names = ["dcp"] + (["sharded", "full"] if accelerate else [])
    for name in names:
        accelerator = None if name == "dcp" else new_accelerator(name)
        model, optimizer, scheduler = new_run(accelerator)
        train(model, optimizer, [7])  # other values than those that are loaded
        if name == "dcp":
            weights, state = get_state_dict(model, optimizer)
            everything = {"model": weights, "optimizer": state, "epoch": 0}
            dcp.load(everything, checkpoint_id=f"{ours}/dcp")
            set_model_state_dict(model, everything["model"])
            set_optimizer_state_dict(model, optimizer, everything["optimizer"])
            assert everything["epoch"] == 3, everything["epoch"]
        else:
            generator = torch.get_rng_state()
            accelerator.load_state(f"{ours}/{name}")
            assert accelerator.step == 5, accelerator.step
            assert scheduler.scheduler.last_epoch == 2, scheduler.state_dict()
            assert not torch.equal(generator, torch.get_rng_state())
            optimizer = optimizer.optimizer  # that of torch
        train(model, optimizer, [2])
        write_json(rank, f"{folder}/read_{name}.json", model, optimizer)


def write_theirs(rank):
    model, optimizer, scheduler = new_run()
    train(model, optimizer, [0, 1])
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "epoch": 3, "scheduler": scheduler, "kind": types.SimpleNamespace}, checkpoint_id=f"{theirs}/dcp")
    keys = {"model": weights, "optim": state}
    dcp.save({"app": keys}, checkpoint_id=f"{theirs}/app")
    dcp.save({"state": {"model": weights, "optimizer": state}, "epoch": 3}, checkpoint_id=f"{theirs}/state")
    dcp.save({"run": {"net": weights, "opt": state, "epoch": 3}}, checkpoint_id=f"{theirs}/run")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state, "epoch": 3}, f"{theirs}/full.pt")
    train(model, optimizer, [2])
    write_json(rank, f"{theirs}/after.json", model, optimizer)
    for kind in KINDS if accelerate else []:
        accelerator = new_accelerator(kind)
        model, optimizer, scheduler = new_run(accelerator)
        train(model, optimizer, [0, 1])
        accelerator.step = 5
        torch.manual_seed(100 + rank)
        accelerator.save_state(f"{theirs}/{kind}")
        if rank == 0:
            torch.save({"counts": [1, 2], "object": nn.Linear}, f"{theirs}/{kind}/custom_checkpoint_0.pkl")
    draws = torch.rand(3).tolist()
    if rank == 1:
        with open(f"{theirs}/draws.json", "w") as file:
            json.dump(draws, file)


def run_as_rank(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    write_theirs(rank)
    if accelerate:
        write_trainer(rank)
    if os.path.exists(ours):
        read_ours(rank)
    if accelerate and os.path.exists(f"{ours}/trainer_sharded"):
        read_trainer(rank)
    dist.destroy_process_group()


def plain_torch():
    """By numbers, with and without names, as one process has it."""
    model = Net()
    for name, parameters in {"numbers": model.parameters(), "names": model.named_parameters()}.items():
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        train(model, optimizer, [0])
        torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}, f"{theirs}/{name}.pt")
    if accelerate:  # without FSDP
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.prepare(model, optimizer)
        accelerator.save_state(f"{theirs}/plain")


def merge():
    """Accelerate's own command on our folder."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(f"{ours}/sharded/pytorch_model_fsdp_0", f"{folder}/merged")


fork_ranks(run_as_rank)
plain_torch()
if accelerate and os.path.exists(ours):
    merge()
print("accelerate" if accelerate else "torch")
