"""torch_files.py FOLDER: checks what tessera/checkpoint/formats/torch/python_test.cpp has written to FOLDER/ours, and writes FOLDER/theirs for it.

Two ranks are forked before anything else, because threads of torch do not survive a fork.
"""
import argparse
import collections
import datetime
import decimal
import json
import os
import sys
import warnings
import zipfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ranks import fork_ranks
from values import flat, numbers

warnings.simplefilter("ignore")
folder = sys.argv[1]
ours, theirs = f"{folder}/ours", f"{folder}/theirs"
os.makedirs(theirs)


def trained(shard):
    """A model and its optimizer after a step; it has more ranks than rows in one place, and a parameter that is never used."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    model.register_parameter("unused", nn.Parameter(numbers(3, 2)))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(numbers(*parameter.shape))
    if shard:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    model(numbers(4, 5)).pow(2).sum().backward()
    optimizer.step()
    return model, optimizer


def save_as_rank(rank):
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    model, optimizer = trained(shard=True)
    weights, state = get_state_dict(model, optimizer)
    everything = {"model": weights, "optimizer": state, "step": 3, "list": [numbers(2), "text"], "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}
    dcp.save(everything, checkpoint_id=f"{theirs}/dcp")
    expected = flat(everything, "", {})
    if rank == 0:
        with open(f"{theirs}/dcp.json", "w") as file:
            json.dump(expected, file)
    dist.destroy_process_group()


DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
          torch.bool, torch.complex64, torch.complex128, torch.complex32, torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2,
          torch.float8_e4m3fn, torch.float8_e5m2fnuz, torch.float8_e4m3fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2]


def bytes_of(dtype):
    return (torch.arange(4 * dtype.itemsize, dtype=torch.uint8) % 2).view(dtype)


def check_ours():
    with zipfile.ZipFile(f"{ours}/file.pt") as archive:
        assert archive.testzip() is None
    for options in ({}, {"mmap": True}):
        content = torch.load(f"{ours}/file.pt", weights_only=True, **options)
        assert list(content) == ["model", "optimizer", "step", "list", "note", "bytes", "large"], content
        model = content["model"]
        assert list(model) == ["a.weight", "b.weight"] + [str(dtype) for dtype in DTYPES], list(model)
        assert torch.equal(model["a.weight"], torch.arange(6.0).view(2, 3)), model["a.weight"]
        assert model["a.weight"].data_ptr() == model["b.weight"].data_ptr() and model["a.weight"].data_ptr() % 64 == 0
        for dtype in DTYPES:
            assert model[str(dtype)].dtype == dtype and torch.equal(model[str(dtype)].view(torch.uint8), bytes_of(dtype).view(torch.uint8)), dtype
        assert list(content["optimizer"]["state"]) == [0] and content["optimizer"]["state"][0]["step"].shape == ()
        assert content["optimizer"]["param_groups"] == [{"betas": [0.9, 0.999], "fused": None, "lr": 0.125}], content["optimizer"]
        assert content["step"] == 3 and type(content["step"]) is int
        assert content["list"][1] == "größe" and content["list"][0].shape == (0, 4)
        assert content["note"] is True and content["bytes"] == b"\x00\xff" and content["large"] == -2**62

    state = {"model": {"a.weight": torch.zeros(3, 2, dtype=torch.bfloat16), "scalar": torch.zeros((), dtype=torch.int64)},
             "groups": [{"lr": 0.0, "params": []}], "epoch": 0}
    dcp.load(state, checkpoint_id=f"{ours}/dcp", no_dist=True)
    expected = {"model": {"a.weight": torch.arange(6).view(3, 2).bfloat16(), "scalar": torch.tensor(7)}, "groups": [{"lr": 0.5, "params": ["x"]}], "epoch": 3}
    assert str(state) == str(expected), state
    dcp_to_torch_save(f"{ours}/dcp", f"{folder}/merged.pt")
    merged = torch.load(f"{folder}/merged.pt", weights_only=True)
    assert str(merged) == str(expected), merged


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.head = nn.Linear(2, 3, bias=False)
        self.head.weight = self.embedding.weight


def write_theirs():
    tied = Tied().state_dict()
    torch.save(tied, f"{theirs}/state.pt")
    model, optimizer = trained(shard=False)
    training = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 3}
    torch.save(training, f"{theirs}/training.pt")
    base = numbers(4, 6)
    many = {"transposed": base.t(), "part": base[1:3, 2:5], "expanded": base[:, :1].expand(4, 3), "parameter": nn.Parameter(numbers(2)), "nested": [numbers(3), {"x": numbers(1)}]}
    many["parameter"].custom = "attribute"
    dtypes = {str(dtype): bytes_of(dtype) for dtype in DTYPES}
    other = {"text": "größe", "none": None, "bytes": b"\x00\xff", "size": torch.Size([1, 2]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "large": 2**62}
    torch.save(many | dtypes | other, f"{theirs}/many.pt")
    torch.serialization.set_crc32_options(False)
    torch.save(many, f"{theirs}/no_checksums.pt")
    torch.serialization.set_crc32_options(True)
    del many["nested"]
    views = many | {"nested.0": numbers(3), "nested.1.x": numbers(1)}
    with open(f"{theirs}/expected.json", "w") as file:
        json.dump({"state": flat(tied, "", {}), "training": flat(training, "", {}), "many": flat(views, "", {})}, file)

    torch.save(tied, f"{theirs}/legacy.pt", _use_new_zipfile_serialization=False)
    torch.jit.save(torch.jit.script(nn.Linear(2, 2)), f"{theirs}/script.pt")
    torch.save({"w": torch.quantize_per_tensor(numbers(2), 0.1, 0, torch.qint8)}, f"{theirs}/quantized.pt")
    torch.save({"w": numbers(2).to_sparse()}, f"{theirs}/sparse.pt")
    torch.save({"w": numbers(2).to(torch.complex64).conj()}, f"{theirs}/conjugate.pt")
    torch.save({"m": nn.Linear(2, 2)}, f"{theirs}/module.pt")
    best = decimal.Decimal("0.5")
    try:
        import numpy
        best = numpy.float64(0.5)
    except ImportError:
        pass
    torch.save({"model": {"w": numbers(2, 3)}, "step": 3, "args": argparse.Namespace(lr=0.1), "when": datetime.datetime(2026, 1, 2), "best": best,
                "counts": collections.Counter("aab"), "defaults": collections.defaultdict(list, a=[1]), "lists": {"a": [1, {2}, range(3)]},
                "net": nn.Linear(2, 2)}, f"{theirs}/classes.pt")


fork_ranks(save_as_rank)
check_ours()
write_theirs()
