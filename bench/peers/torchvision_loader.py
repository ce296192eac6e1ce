"""Decodes and augments the pictures of a folder by torchvision as one trains with them, and prints how many in a second as one line of JSON. Pillow decodes,
and then transforms.v2 work on its pictures, or on tensors of bytes. Its flags are those of bench_pictures."""
import argparse
import json
import pathlib
import sys
import time

import torch

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "tests/python"))
import torchvision_python  # noqa: E402, F401  before torchvision
from torchvision.datasets import ImageFolder  # noqa: E402
from torchvision.transforms import v2  # noqa: E402


def transform_of(options):
    first = [v2.PILToTensor()] if options.tensors else []
    augment = [v2.RandAugment()] if options.rand_augment else []
    last = [] if options.tensors else [v2.PILToTensor()]
    numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), inplace=True)]
    return v2.Compose([*first, v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), *augment, *last, *numbers])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    for name, default in (("workers", 2), ("batch", 32), ("warmup", 13), ("batches", 26)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rand-augment", action="store_true")
    parser.add_argument("--tensors", action="store_true", help="transforms work on tensors of bytes instead of pictures of Pillow")
    options = parser.parse_args()
    pictures = ImageFolder(options.folder, transform_of(options))
    # Goes through the pictures again and again, with some batches to spare: no worker is idle while the clock runs.
    count = (options.warmup + options.batches + 4 * options.workers) * options.batch
    sampler = torch.utils.data.RandomSampler(pictures, num_samples=count)
    batches = iter(torch.utils.data.DataLoader(pictures, options.batch, sampler=sampler, num_workers=options.workers))

    def take(number):
        for _ in range(number):
            next(batches)

    take(options.warmup)
    begin = time.perf_counter()
    take(options.batches)
    print(json.dumps({"pictures_per_second": options.batches * options.batch / (time.perf_counter() - begin)}))


if __name__ == "__main__":
    main()
