"""Trains and tests a network of torchvision on folders of pictures as its references/classification/train.py does with `--backend tensor`, in one process,
with the settings of recipes/imagenet and its cosine, and writes the same lines of metrics. Its flags are those of the recipe, but its batches are those of
all ranks together."""
import argparse
import json
import math
import pathlib
import sys

import torch

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/python"))
import torchvision_python  # noqa: E402, F401  before torchvision
import torchvision  # noqa: E402
from torchvision.transforms import v2  # noqa: E402


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--datadir", type=pathlib.Path, required=True)
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--metrics", type=pathlib.Path, required=True)
    for name, default in (("image-size", 224), ("batch-size", 256), ("test-set-batch-size", 64), ("num-epochs", 18), ("num-workers", 2), ("log-steps", 20),
                          ("seed", 42)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name, default in (("lr", 0.1), ("momentum", 0.9), ("weight-decay", 1e-4), ("num-warmup-epochs", 0.9)):
        parser.add_argument(f"--{name}", type=float, default=default)
    return parser.parse_args()


def load(options):
    """Loaders of pictures to train and to test with."""
    numbers = [v2.ToDtype(torch.float32, scale=True), v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))]
    size = options.image_size
    training = v2.Compose([v2.PILToTensor(), v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), *numbers])
    test = v2.Compose([v2.PILToTensor(), v2.Resize((size * 8 + 3) // 7, antialias=True), v2.CenterCrop(size), *numbers])
    folder = torchvision.datasets.ImageFolder
    more = {"num_workers": options.num_workers, "persistent_workers": options.num_workers > 0}
    return (torch.utils.data.DataLoader(folder(options.datadir / "train", training), options.batch_size, shuffle=True, **more),
            torch.utils.data.DataLoader(folder(options.datadir / "val", test), options.test_set_batch_size, **more))


def rate_of(options, steps_of_epoch):
    """The factor of the learning rate in a step: rises in equal parts, and then falls along a cosine to 0."""
    steps = options.num_epochs * steps_of_epoch
    warmup = min(int(options.num_warmup_epochs * steps_of_epoch + 0.5), steps - 1)
    return lambda step: (step + 1) / warmup if step < warmup else 0.5 * (1 + math.cos(math.pi * (step - warmup) / (steps - warmup)))


@torch.inference_mode()
def accuracy_of(model, test):
    model.eval()
    right = count = 0
    for images, labels in test:
        right += (model(images).argmax(1) == labels).sum().item()
        count += len(labels)
    model.train()
    return 100 * right / count


def main():
    options = parse()
    torch.manual_seed(options.seed)
    training, test = load(options)
    model = torchvision.models.get_model(options.model, num_classes=len(training.dataset.classes))
    criterion = torch.nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), options.lr, options.momentum, weight_decay=options.weight_decay)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_of(options, len(training)))
    step = 0
    with options.metrics.open("w", buffering=1) as metrics:

        def log(**values):
            metrics.write(json.dumps({"step": step, **values}) + "\n")

        for _ in range(options.num_epochs):
            for images, labels in training:
                loss = criterion(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                if step % options.log_steps == 0:
                    log(loss=loss.item(), lr=schedule.get_last_lr()[0])
                schedule.step()
            log(accuracy=accuracy_of(model, test))


if __name__ == "__main__":
    main()
