"""An independent re-statement of torch_xla's rules for rank files of FSDP: torch_xla itself can't run here.

torch_xla_rules.py write FOLDER: writes the rank files of a model for several numbers of ranks and ways to wrap it, and what is in them.
"""
import os
import sys

import torch
from torch import nn

SEPARATOR = "_FSDP_SHARD_SEPARATOR_"
LANES = 128  # of which the number of values of a rank is a multiple


def strip(name):
    return name.replace("_fsdp_wrapped_module.", "").replace("_fpw_module.", "")


class Flat(nn.Module):
    """What stands between a wrapper and its module. Each group of parameters becomes one vector, flat_param_N."""

    def __init__(self, module, groups):
        super().__init__()
        self._fpw_module = module
        self.lists = []
        for group in filter(None, groups):
            places = [(f"{path}.{name}", part, name, each) for path, part in self.named_modules() for name, each in part.named_parameters(recurse=False)
                      if any(each is own for own in group)]
            first = {}  # a tied parameter counts where it comes first
            for place in places:
                first.setdefault(id(place[3]), place)
            members = [each for _, _, _, each in first.values()]
            vector = nn.Parameter(torch.cat([each.detach().reshape(-1) for each in members]), requires_grad=members[0].requires_grad)
            for _, part, name, _ in places:
                del part._parameters[name]
            self.register_parameter(f"flat_param_{len(self.lists)}", vector)
            self.lists.append(([name for name, *_ in first.values()], [each.size() for each in members], [each.numel() for each in members]))
        self._register_state_dict_hook(self.shorten)

    @staticmethod
    def shorten(_, state, prefix, *__):
        for key in list(state):
            if key.startswith(prefix + "_fpw_module."):
                state[prefix + key[len(prefix) + len("_fpw_module."):]] = state.pop(key)


class Wrapper(nn.Module):
    def __init__(self, module, rank, world, flatten=False, rows=False, buffer_dtype=None):
        super().__init__()
        self.rank, self.world, self.rows, self.lanes = rank, world, rows and not flatten, 1 if rows else LANES
        own = [each for each in module.parameters() if not hasattr(each, "is_shard")]
        groups = [[each for each in own if each.requires_grad], [each for each in own if not each.requires_grad]] if flatten else []
        self._fsdp_wrapped_module = Flat(module, groups)
        self.info = {}
        shards = {}
        for path, part in list(self.named_modules()):
            for name, each in list(part.named_parameters(recurse=False)):
                if hasattr(each, "is_shard"):
                    continue
                if id(each) not in shards:
                    original = f"{path}.{name}"
                    key = ("_fsdp_shard." + original).replace(".", SEPARATOR)
                    shards[id(each)] = key, each, nn.Parameter(self.shard(each.detach()), requires_grad=each.requires_grad)
                    self.info[key] = {"_orig_size": each.size(), "_orig_name": original}
                del part._parameters[name]
        for key, _, shard in shards.values():
            shard.is_shard = True
            self.register_parameter(key, shard)
        self.cast(buffer_dtype)

    def shard(self, whole):
        if not self.rows:
            whole = whole.flatten()
        size, unit = whole.size(0), self.world * self.lanes
        padding = -size % unit
        whole = torch.cat([whole, whole.new_zeros(padding, *whole.shape[1:])])
        return whole.chunk(self.world)[self.rank].clone() if whole.size(0) else whole

    def cast(self, dtype):
        for part in self.modules():
            for name, each in list(part.named_buffers(recurse=False)):
                if dtype and each.is_floating_point() and each.dtype != dtype:
                    part._buffers[name] = each.to(dtype)
                    part._buffers[name].original = each.dtype

    def shard_metadata(self):
        info, lists = {}, {}
        for path, part in self.named_modules(remove_duplicate=False):
            path = path.replace("_fpw_module.", "")
            if isinstance(part, Wrapper):
                info[path] = part.info
            if isinstance(part, Flat):
                lists.update({f"{path}.flat_param_{i}": each for i, each in enumerate(part.lists)})
        # torch_xla leaves "_fpw_module." in these names, so that its own consolidation never finds them and keeps the dtype.
        buffers = {name: {"_orig_dtype": each.original} for name, each in self.named_buffers() if hasattr(each, "original")}
        return {"shard_info": info, "flatten_info": lists, "buffer_info": buffers, "world_size": self.world, "rank": self.rank}


def consolidated(files):
    files = sorted(files, key=lambda each: each["shard_metadata"]["rank"])
    metadata = files[0]["shard_metadata"]
    assert [each["shard_metadata"]["rank"] for each in files] == list(range(metadata["world_size"]))
    assert all(set(each["shard_metadata"]) == {"shard_info", "flatten_info", "buffer_info", "world_size", "rank"} for each in files)
    full = {}
    for name, value in files[0]["model"].items():
        if name in metadata["buffer_info"]:
            value = value.to(metadata["buffer_info"][name]["_orig_dtype"])
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts) if part.startswith("_fsdp_shard")), None)
        if place is None:
            full[name] = value
            continue
        module, key = ".".join(parts[:place]), ".".join(parts[place:])
        info = metadata["shard_info"][module][key]
        assert set(info) == {"_orig_size", "_orig_name"}
        size = list(info["_orig_size"])
        whole = torch.cat([each["model"][name] for each in files])
        assert whole.dim() > 1 or len(whole) % (LANES * len(files)) == 0 or size[0] <= len(whole) < size[0] + len(files), "another padding"
        assert len({each["model"][name].shape for each in files}) == 1, "parts of different sizes"
        whole = whole[:torch.Size(size).numel()].view(size) if whole.dim() == 1 else whole[:size[0]]
        full[(module + "." if module else "") + info["_orig_name"]] = whole
    for name in [each for each in full if "_fsdp_wrapped_module.flat_param_" in each]:
        names, shapes, numels = metadata["flatten_info"][name]
        for own, shape, values in zip(names, shapes, full.pop(name).split(list(numels))):
            full[name.rsplit(".", 1)[0] + "." + own] = values.view(list(shape))
    return {strip(name): value for name, value in full.items()}


class Picture(nn.Module):
    """As tests/testing/picture.h."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.norm = nn.BatchNorm2d(5)
        self.head = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 3).requires_grad_(False)
        self.tied = self.head.weight
        with torch.no_grad():
            for i, value in enumerate([*self.parameters(), *self.buffers()]):
                value.copy_(torch.arange(value.numel()).add(i).mul(0.37).sin().mul(8).view(value.shape))


def wrapped(rank, world, nested, **options):
    model = Picture()
    if nested:
        model.conv = Wrapper(model.conv, rank, world, **options)
        model.norm = Wrapper(model.norm, rank, world, **options)
    return Wrapper(model, rank, world, **options)


WAYS = {
    "plain": {"nested": False},
    "nested": {"nested": True, "buffer_dtype": torch.bfloat16},
    "flat": {"nested": False, "flatten": True},
    "nested_flat": {"nested": True, "flatten": True},
    "rows": {"nested": True, "rows": True},
}


def state_of(model):
    """An optimizer of all parameters with state as after three steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.125)
    for each in optimizer.param_groups[0]["params"]:
        if each.requires_grad:
            optimizer.state[each] = {"step": torch.tensor(3.0), "exp_avg": each.detach() * 0.5, "exp_avg_sq": each.detach() * 0.25}
    return optimizer.state_dict()


def write(folder):
    for way, options in WAYS.items():
        expected = Picture().state_dict()
        del expected["head.weight"]  # the model lists its own "tied" first, which is the same
        for name in ("norm.running_mean", "norm.running_var"):
            expected[name] = expected[name].to(options.get("buffer_dtype", torch.float32)).float()
        torch.save(expected, f"{folder}/{way}_expected.pth")
        for world in (1, 2, 3):
            files = []
            for rank in range(world):
                model = wrapped(rank, world, **options)
                files.append({"model": model.state_dict(), "shard_metadata": model.shard_metadata(), "optimizer": state_of(model), "epoch": 7})
                torch.save(files[-1], f"{folder}/{way}{world}_rank-{rank:08d}-of-{world:08d}.pth")
            # The rules agree with themselves, but for the dtype of buffers.
            assert {name: value.to(expected[name].dtype).tolist() for name, value in consolidated(files).items()} == {
                name: value.tolist() for name, value in expected.items()}, way


os.makedirs(sys.argv[2], exist_ok=True)
assert sys.argv[1] == "write"
write(sys.argv[2])
