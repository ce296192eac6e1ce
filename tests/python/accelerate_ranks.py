"""accelerate_ranks.py FOLDER: for tessera/train/accelerate_test.cpp. What Accelerate's functions among ranks give rank R of two, a line for each, in
FOLDER/rank-R. Ends with status 77 if there is no package accelerate.
"""
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

from ranks import fork_ranks

try:
    import accelerate
except ImportError:
    sys.exit(77)

folder = sys.argv[1]
SIZES = [(9, 5), (8, 2), (7, 2), (3, 4), (1, 1), (10, 3), (5, 1)]  # of a data set, and of a batch of each rank


class Numbers(IterableDataset):
    def __init__(self, size):
        self.size = size

    def __iter__(self):
        return iter(torch.arange(self.size))


def joined(rank):
    """Rank 1 has three batches, rank 0 has one."""
    model = torch.nn.Linear(2, 1, bias=False, dtype=torch.double)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[0.5, -0.25]]))
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    with replica.join(divide_by_initial_world_size=False):
        for batch in range(1 + 2 * rank):
            optimizer.zero_grad()
            replica(torch.tensor([[rank + 1.0, batch], [1.0, 2.0]], dtype=torch.double)).pow(2).mean().backward()
            optimizer.step()
    return model.weight


def results(accelerator, rank):
    for size, batch in SIZES:
        for drop_last in [False, True]:
            shard = accelerate.data_loader.IterableDatasetShard(Numbers(size), batch_size=batch, drop_last=drop_last, num_processes=2, process_index=rank)
            yield f"stream {size} {batch} {drop_last:d}", torch.tensor(list(shard))
    dispatching = accelerate.Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(dispatch_batches=True))
    for size, batch in SIZES:
        loader = dispatching.prepare(DataLoader(Numbers(size), batch_size=batch))
        for number, rows in enumerate(loader):
            fresh = loader.remainder if loader.end_of_dataloader and loader.remainder > 0 else 2 * len(rows)
            yield f"dispatched {size} {batch} {number}", rows[: max(fresh - rank * len(rows), 0)]
    yield "joined", (joined(rank) * 1e9).round().long()
    for size, batch in SIZES:
        loader = accelerator.prepare(DataLoader(torch.arange(size), batch_size=batch))
        pairs = [accelerator.gather_for_metrics((numbers, 2 * numbers)) for numbers in loader]
        for which in range(2):
            yield f"gather_for_metrics {size} {batch} {which}", torch.cat([pair[which] for pair in pairs])
    own = torch.arange(6).view(2, 3) + 10 * rank
    yield "gather", accelerator.gather(own)
    yield "gather number", accelerator.gather(torch.tensor(rank + 3))
    for reduction in ["sum", "mean"]:
        yield f"reduce {reduction}", accelerator.reduce(own.float(), reduction=reduction).long()
    uneven = torch.arange(2 * (3 + rank)).view(2, -1)
    for pad_first in [False, True]:
        yield f"pad {pad_first:d}", accelerator.pad_across_processes(uneven, dim=1, pad_index=7, pad_first=pad_first)
    for length in range(6):
        with accelerator.split_between_processes(torch.arange(length)) as own:
            yield f"split {length}", own
    for device_specific in [False, True]:
        accelerate.utils.set_seed(41, device_specific=device_specific)
        yield f"seed {device_specific:d}", torch.randint(0, 1000000, (4,))


def run_as_rank(rank):
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2", ACCELERATE_USE_CPU="true")
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    accelerator = accelerate.Accelerator(cpu=True)
    with open(f"{folder}/rank-{rank}", "w") as file:
        for name, tensor in results(accelerator, rank):
            print(f"{name}:", *tensor.flatten().tolist(), file=file)
    dist.destroy_process_group()


fork_ranks(run_as_rank)
