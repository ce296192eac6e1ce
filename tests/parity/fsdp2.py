"""Trains each case of cases.json with PyTorch's own FSDP2, on CPUs over gloo, and saves what tests/parity/parity_test.cpp compares: losses, norms
of gradients, final weights and optimizer states, and the bytes that a rank receives in a step.

fsdp2.py CASES RESULT. Weights and batches come from a formula, so that others can train the same. All ranks are forked from one
interpreter, because to import torch takes longer than a case. Cases of two ranks are shared out among two pairs.
"""
import contextlib
import ctypes
import functools
import json
import math
import os
import sys
import tempfile
import warnings

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_optimizer_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

RANKS, STEPS = 4, 3
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def numbers(shape, shift=0):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).add(shift).sin().view(shape)


class Model(nn.Module):
    """What all models have: batches, and a loss."""

    def inputs(self, shift):
        return numbers([6, 8], shift)

    def loss(self, output, shift):
        return (output - numbers(output.shape, shift + 5)).pow(2).mean()


class Mlp(Model):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(torch.relu(self.second(self.norm(torch.tanh(self.first(x))))))


class Attention(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind()
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.norm2 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Gpt(Model):
    """As tessera/models/gpt.h."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(30, 16)
        self.positions = nn.Embedding(9, 16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 30, bias=False)
        self.blocks = nn.ModuleList(Block(16, 2) for _ in range(2))

    def inputs(self, shift):
        return (torch.arange(27) * 7 + 3 * shift).remainder(30).view(3, 9)

    def loss(self, output, shift):
        return F.cross_entropy(output.flatten(0, 1), self.inputs(shift + 1).flatten())

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.scores(self.norm(x))

    def scores(self, x):
        return self.head(x)


class Tied(Gpt):
    """Its head is its embedding."""

    def __init__(self):
        super().__init__()
        del self.head
        self.head = self.tokens.weight

    def scores(self, x):
        return F.linear(x, self.head)


class Conv(Model):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.second = nn.Conv2d(6, 4, 3)

    def inputs(self, shift):
        return numbers([3, 2, 8, 8], shift)

    def forward(self, x):
        return self.second(torch.relu(self.norm(self.first(x))))


class Lstm(Model):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(8, 10, 2)
        self.head = nn.Linear(10, 3)

    def inputs(self, shift):
        return numbers([5, 4, 8], shift)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


class Branches(Model):
    """Takes one of two ways, by the first value of its input."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.left = nn.Linear(8, 8)
        self.right = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3)

    def inputs(self, shift):
        x = numbers([6, 8], shift)
        x[0, 0] = shift % 2
        return x

    def forward(self, x):
        way = self.left if x[0, 0] == 0 else self.right
        return self.last(torch.tanh(way(torch.tanh(self.first(x)))))


MODELS = {"mlp": Mlp, "gpt": Gpt, "tied": Tied, "conv": Conv, "lstm": Lstm, "branches": Branches}


class Received(TorchDispatchMode):
    """Bytes that this rank receives in FSDP2's own collectives, counted as an exchange of chunks would receive them."""

    def __init__(self):
        super().__init__()
        self.bytes = {"gathered": 0, "reduced": 0, "all_reduced": 0}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        if name == "c10d::_allgather_base_":
            self.bytes["gathered"] += args[0].nbytes - args[1].nbytes
        elif name == "c10d::_reduce_scatter_base_":
            self.bytes["reduced"] += args[1].nbytes - args[0].nbytes
        elif name == "c10d::allreduce_":
            self.bytes["all_reduced"] += sum(tensor.nbytes for tensor in args[0])
        return func(*args, **(kwargs or {}))


@functools.cache
def mesh_of(shape):
    """The ranks of this one's part of the world, over which a case of this shape runs: axes replicate and shard, or only shard."""
    names = ("replicate", "shard")[-len(shape):]
    ranks = torch.arange(RANKS - RANKS % math.prod(shape)).view(-1, *shape)
    return DeviceMesh("cpu", ranks, mesh_dim_names=("part", *names))[names if len(names) > 1 else names[0]]


def own_parameters(net, names):
    """The parameters of modules and parameters by these names."""
    found = {name: [parameter] for name, parameter in net.named_parameters()}
    return [parameter for name in names for parameter in found.get(name) or net.get_submodule(name).parameters()]


def shard(net, case, units, mesh, apart):
    dtype = lambda key: DTYPES[case[key]] if key in case else None
    policy = MixedPrecisionPolicy(param_dtype=dtype("param_dtype"), reduce_dtype=dtype("reduce_dtype"))
    dim = case.get("shard_dim")
    options = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": case.get("reshard_after_forward"),
        "ignored_params": set(apart),
        "shard_placement_fn": (lambda p: Shard(dim) if p.dim() > dim else None) if dim else None,
    }
    for name in case.get("checkpoint", []):
        module = net.get_submodule(name)
        module.forward = functools.partial(checkpoint, module.forward, use_reentrant=False)
    for unit in units:
        fully_shard([net.get_submodule(name) for name in unit] if isinstance(unit, list) else net.get_submodule(unit), **options)
    options["mp_policy"] = MixedPrecisionPolicy(policy.param_dtype, policy.reduce_dtype, output_dtype=dtype("output_dtype"))
    fully_shard(net, **options)


def fill(net):
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            values = numbers(parameter.shape, i).mul(0.3)
            parameter.copy_(distribute_tensor(values, parameter.device_mesh, parameter.placements) if isinstance(parameter, DTensor) else values)


def give_values(net, case):
    """To a model that was on the meta device when it was sharded."""
    net.to_empty(device="cpu")
    for module in net.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    if case["start"] == "deferred":
        return fill(net)
    whole_net = MODELS[case["model"]]()
    fill(whole_net)
    state = whole_net.state_dict() if dist.get_rank() % case["ranks"] == 0 else {}
    set_model_state_dict(net, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))


def prepare(net, case, units):
    """What is set after the model has been sharded."""
    if case.get("prefetch") == "lists":
        modules = [net.get_submodule(name) for name in units]
        for one, other in zip(modules, modules[1:]):
            one.set_modules_to_forward_prefetch([other])
            other.set_modules_to_backward_prefetch([one])
    if "divide" in case:
        for module in net.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)  # gloo has no other sum
                module.set_gradient_divide_factor(case["divide"][0] * case["divide"][1])
    if "unused" in case:
        net.set_reduce_scatter_unused_params(True)


def make_optimizer(case, parameters):
    name = case.get("optimizer", "sgd")
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.5)


def step_in_backward(case, parameters):
    def step(parameter, optimizer):
        optimizer.step()
        optimizer.zero_grad()

    for parameter in parameters:
        optimizer = make_optimizer(case, [parameter])
        parameter.register_post_accumulate_grad_hook(functools.partial(step, optimizer=optimizer))


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def norm_of(gradients, p):
    return torch.linalg.vector_norm(torch.stack([whole(torch.linalg.vector_norm(gradient, p)) for gradient in gradients]), p)


def forward_and_backward(net, case, step, rank, scaler):
    """The passes of one step. Returns the last one's loss."""
    passes = case.get("passes", 1)
    for number in range(passes):
        last = number == passes - 1
        if case.get("accumulate") in ("no_sync", "requires_gradient_sync"):
            net.set_requires_gradient_sync(last)
        if "reshard_after_backward" in case:
            net.set_reshard_after_backward(last)
        if case.get("accumulate") == "requires_all_reduce":
            net.set_requires_all_reduce(last)
        shift = 100 * step + 10 * number + (0 if case["model"] == "branches" and "unused" not in case else rank)
        shift += step % 2 if case["model"] == "branches" else 0
        output = net(net.inputs(shift))
        loss = net.loss(output if "output_dtype" in case else output.float(), shift)
        (scaler.scale(loss) if scaler else loss).backward()
    return loss.detach().clone()


def train(case, units):
    mesh = mesh_of(tuple(case.get("mesh", [case["ranks"]])))
    ranks = case["ranks"]
    rank = dist.get_rank() % ranks
    part = mesh_of((ranks,)).get_group()
    with torch.device("meta" if "start" in case else "cpu"):
        net = MODELS[case["model"]]()
    if "start" not in case:
        fill(net)
    for parameter in own_parameters(net, case.get("frozen", [])):
        parameter.requires_grad_(False)
    if "buffer_dtype" in case:  # FSDP2 leaves buffers to the program
        for buffer in net.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(DTYPES[case["buffer_dtype"]])
    apart = own_parameters(net, case.get("ignored", []) + case.get("replicated", []))
    shard(net, case, units, mesh, apart)
    if "start" in case:
        give_values(net, case)
    prepare(net, case, units)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    in_backward = case.get("in_backward", False)
    optimizer = step_in_backward(case, trained) if in_backward else make_optimizer(case, trained)
    scaler = torch.amp.GradScaler("cpu", init_scale=case["scale"], growth_interval=2) if "scale" in case else None
    losses, norms = [], []
    for step in range(STEPS):
        received = Received()
        with received if step == STEPS - 1 else contextlib.nullcontext():
            loss = forward_and_backward(net, case, step, rank, scaler)
        if not in_backward:
            for parameter in apart:
                dist.all_reduce(parameter.grad, group=part)
                parameter.grad /= ranks
            if scaler:
                scaler.unscale_(optimizer)
            p = float(case.get("clip_norm", {}).get("p", 2))
            norms.append(norm_of([parameter.grad for parameter in trained if parameter.grad is not None], p).item())
            if "clip_norm" in case:
                clipped = nn.utils.clip_grad_norm_(trained, case["clip_norm"]["max"], norm_type=p)
                assert abs(whole(clipped).item() - norms[-1]) <= 1e-5 * norms[-1]
            if "clip_value" in case:
                nn.utils.clip_grad_value_(trained, case["clip_value"])
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        dist.all_reduce(loss, group=part)
        losses.append(loss.item() / ranks)
    result = {"losses": torch.tensor(losses, dtype=torch.double), "norms": torch.tensor(norms, dtype=torch.double)}
    for name, value in received.bytes.items():
        result[name] = torch.tensor(value)
    options = StateDictOptions(full_state_dict=True)
    for name, value in get_model_state_dict(net, options=options).items():
        result["state/" + name] = value.float().clone()
    if not in_backward:
        for name, state in get_optimizer_state_dict(net, optimizer, options=options)["state"].items():
            for key, value in state.items():
                result[f"state/optimizer.{name}.{key}"] = value.float().clone()
    return result


def run(rank, cases, models, folder):
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    results = {}
    for i, case in enumerate(cases):
        mine = i % 2 == rank // 2 if case["ranks"] == 2 else rank < case["ranks"]
        mesh_of(tuple(case.get("mesh", [case["ranks"]])))  # made by all ranks
        mesh_of((case["ranks"],))
        if not mine:
            continue
        try:
            for name, value in train(case, case.get("units", models[case["model"]]["units"])).items():
                results[f"{case['name']}/{name}"] = value
        except Exception as error:
            raise RuntimeError(f"{case['name']}: {error}") from error
    if rank % 2 == 0:
        torch.save(results, f"{folder}/{rank}")
    dist.barrier()
    os._exit(0)  # gloo's threads now and then abort an orderly end


def main(cases_path, result_path):
    with open(cases_path) as file:
        corpus = json.load(file)
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view")
    torch.set_num_threads(1)  # as there: the order of sums shows
    with tempfile.TemporaryDirectory() as folder:
        children = set()
        for rank in range(RANKS):
            child = os.fork()
            if child == 0:
                try:
                    ctypes.CDLL(None).prctl(1, 9)  # to die with the parent
                    run(rank, corpus["cases"], corpus["models"], folder)
                except BaseException:
                    sys.excepthook(*sys.exc_info())
                    os._exit(1)
            children.add(child)
        while children:
            child, status = os.wait()
            children.remove(child)
            if status:
                for other in children:  # would wait for the one that failed
                    os.kill(other, 9)
                sys.exit(1)
        merged = torch.load(f"{folder}/0")
        merged.update(torch.load(f"{folder}/2"))
        torch.save(merged, result_path)


if __name__ == "__main__":
    main(*sys.argv[1:])
