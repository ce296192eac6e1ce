"""Values of tensors that a test's program in C++ knows, and values of tensors as lists of numbers for it."""
import torch
from torch.distributed.tensor import DTensor


def numbers(*shape):
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).mul(0.7).sin().view(shape)


def flat(value, name, result):
    """The values by name, as lists of numbers."""
    if isinstance(value, torch.Tensor):
        value = value.full_tensor() if isinstance(value, DTensor) else value
        result[name] = value.detach().double().flatten().tolist()
    elif isinstance(value, dict):
        for key, item in value.items():
            flat(item, f"{name}.{key}" if name else str(key), result)
    return result
