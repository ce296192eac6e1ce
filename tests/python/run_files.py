"""run_files.py FOLDER: reads the run that tessera/checkpoint/run_python_test.cpp has written to FOLDER/ours, takes a step of it, and writes a run of its own to
FOLDER/theirs: for Accelerate by its own functions, and by PyTorch's alone.

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
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.tensor import DTensor

from ranks import fork_ranks

try:
    import accelerate
    from accelerate.checkpointing import load_accelerator_state, save_accelerator_state
    from accelerate.utils import fsdp_utils
except ImportError:
    accelerate = None

warnings.simplefilter("ignore")
folder = sys.argv[1]
ours, theirs = f"{folder}/ours", f"{folder}/theirs"
os.makedirs(theirs)
KINDS = {"sharded": StateDictType.SHARDED_STATE_DICT, "full": StateDictType.FULL_STATE_DICT}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 10), nn.Linear(10, 10), nn.Linear(10, 4)

    def forward(self, x):
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).sin().view(shape)


def new_run():
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.02)


def train(model, optimizer, steps):
    for step in steps:
        model(numbers(3, 6) + 0.25 * step).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def flat(value, name, result):
    """The values by name, as lists of numbers."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        result[name] = value.detach().double().flatten().tolist()
    elif isinstance(value, dict):
        for key, item in value.items():
            flat(item, f"{name}.{key}" if name else str(key), result)
    return result


def write_json(rank, path, model, optimizer):
    weights, state = get_state_dict(model, optimizer)
    result = flat(weights, "", {}) | flat(state["state"], "optimizer", {})
    if rank == 0:
        with open(path, "w") as file:
            json.dump({"tensors": result, "lr": optimizer.param_groups[0]["lr"], "betas": optimizer.param_groups[0]["betas"]}, file)


class Accelerated:
    """What Accelerate's functions ask of a plugin and of an Accelerator."""

    def __init__(self, kind):
        self.plugin = types.SimpleNamespace(fsdp_version=2, state_dict_type=KINDS[kind], state_dict_config=types.SimpleNamespace(),
                                            optim_state_dict_config=types.SimpleNamespace(rank0_only=False))
        self.accelerator = types.SimpleNamespace(num_processes=2, process_index=dist.get_rank(), is_fsdp2=True,
                                                 is_main_process=dist.get_rank() == 0, wait_for_everyone=dist.barrier)

    def save(self, path, model, optimizer, scheduler):
        fsdp_utils.save_fsdp_model(self.plugin, self.accelerator, model, path)
        fsdp_utils.save_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, path)
        save_accelerator_state(path, [], [], [scheduler], [], dist.get_rank(), step=5)

    def load(self, path, model, optimizer, scheduler):
        fsdp_utils.load_fsdp_model(self.plugin, self.accelerator, model, path)
        fsdp_utils.load_fsdp_optimizer(self.plugin, self.accelerator, optimizer, model, path)
        return load_accelerator_state(path, [], [], [scheduler], [], dist.get_rank())


def read_ours(rank):
    """Each checkpoint goes on for a step here."""
    names = ["dcp"] + (["sharded", "full"] if accelerate else [])
    for name in names:
        model, optimizer = new_run()
        train(model, optimizer, [7])  # other values than those that are loaded
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        if name == "dcp":
            weights, state = get_state_dict(model, optimizer)
            everything = {"model": weights, "optimizer": state, "epoch": 0}
            dcp.load(everything, checkpoint_id=f"{ours}/dcp")
            set_model_state_dict(model, everything["model"])
            set_optimizer_state_dict(model, optimizer, everything["optimizer"])
            assert everything["epoch"] == 3, everything["epoch"]
        else:
            generator = torch.get_rng_state()
            found = Accelerated(name).load(f"{ours}/{name}", model, optimizer, scheduler)
            assert found == {"step": 5}, found
            assert scheduler.last_epoch == 2, scheduler.state_dict()
            assert not torch.equal(generator, torch.get_rng_state())
        train(model, optimizer, [2])
        write_json(rank, f"{folder}/read_{name}.json", model, optimizer)


def write_theirs(rank):
    torch.manual_seed(100 + rank)
    model, optimizer = new_run()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    train(model, optimizer, [0, 1])
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state, "epoch": 3, "scheduler": scheduler, "kind": types.SimpleNamespace}, checkpoint_id=f"{theirs}/dcp")
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights, state = get_model_state_dict(model, options=full), get_optimizer_state_dict(model, optimizer, options=full)
    if rank == 0:
        torch.save({"model": weights, "optimizer": state, "epoch": 3}, f"{theirs}/full.pt")
    if accelerate:
        for kind in KINDS:
            Accelerated(kind).save(f"{theirs}/{kind}", model, optimizer, scheduler)
            if rank == 0:
                torch.save({"counts": [1, 2], "object": nn.Linear}, f"{theirs}/{kind}/custom_checkpoint_0.pkl")
    write_json(rank, f"{theirs}/before.json", model, optimizer)
    draws = torch.rand(3).tolist()
    if rank == 1:
        with open(f"{theirs}/draws.json", "w") as file:
            json.dump(draws, file)
    train(model, optimizer, [2])
    write_json(rank, f"{theirs}/after.json", model, optimizer)


def run_as_rank(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    if accelerate:
        accelerate.PartialState(cpu=True)
    write_theirs(rank)
    if os.path.exists(ours):
        read_ours(rank)
    dist.destroy_process_group()


def plain_torch():
    """By numbers, with and without names, as one process has it."""
    model = Net()
    for name, parameters in {"numbers": model.parameters(), "names": model.named_parameters()}.items():
        optimizer = torch.optim.AdamW(parameters, lr=0.05)
        train(model, optimizer, [0])
        torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict(), "epoch": 3}, f"{theirs}/{name}.pt")
    if accelerate:  # without FSDP
        accelerate.PartialState(cpu=True)
        os.makedirs(f"{theirs}/plain")
        save_accelerator_state(f"{theirs}/plain", [model.state_dict()], [optimizer], [], [], 0, step=5)


def merge():
    """Accelerate's own command on our folder."""
    from accelerate.utils import merge_fsdp_weights

    merge_fsdp_weights(f"{ours}/sharded/pytorch_model_fsdp_0", f"{folder}/merged")


fork_ranks(run_as_rank)
plain_torch()
if accelerate and os.path.exists(ours):
    merge()
print("accelerate" if accelerate else "torch")
