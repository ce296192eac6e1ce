"""Trains a small net with PyTorch's own FSDP2 and prints one line a step: dtype, mean loss over the ranks, norm of the gradients.

Weights and batches come from a formula, so that tessera/shard/pytorch_test.cpp can train the same. Started by torchrun.
"""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

STEPS = 10


def numbers(shape, shift):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).add(shift).sin().view(shape)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 32)
        self.norm = nn.LayerNorm(32)
        self.second = nn.Linear(32, 32)
        self.last = nn.Linear(32, 4)

    def forward(self, x):
        return self.last(torch.relu(self.second(self.norm(torch.tanh(self.first(x))))))


def train(mesh, name, policy):
    net = Net()
    with torch.no_grad():
        for i, parameter in enumerate(net.parameters()):
            parameter.copy_(numbers(parameter.shape, i).mul(0.3))
    for child in (net.first, net.second):
        fully_shard(child, mesh=mesh, mp_policy=policy)
    fully_shard(net, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(STEPS):
        shift = 10 * step + dist.get_rank()
        output = net(numbers([6, 8], shift)).float()
        loss = (output - numbers([6, 4], shift + 5)).pow(2).mean()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 0.5).full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if dist.get_rank() == 0:
            print(name, f"{mean.item() / dist.get_world_size():.9g}", f"{norm.item():.9g}", flush=True)


dist.init_process_group("gloo")
world = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
train(world, "float32", MixedPrecisionPolicy())
train(world, "bfloat16", MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
dist.barrier()
os._exit(0)  # gloo's threads now and then abort an orderly end
