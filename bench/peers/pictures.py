"""pictures.py photographs FOLDER COUNT SIDE: writes JPEGs with the detail of photographs, about 3/4 SIDE by SIDE pixels, the same each time.
pictures.py fashion FOLDER TRAIN VAL: writes the first pictures of Fashion-MNIST as JPEGs, into FOLDER/train and FOLDER/val.
Each class has a folder of its own, as torchvision.datasets.ImageFolder reads them."""
import gzip
import pathlib
import sys

import numpy as np
from PIL import Image

FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")
CLASSES = "top trousers pullover dress coat sandal shirt sneaker bag boot".split()


def noise(random, height, width, cells):
    """Smooth between so many points along the longer side."""
    side = max(height, width)
    points = random.standard_normal((cells * height // side + 2, cells * width // side + 2), dtype=np.float32)
    return np.asarray(Image.fromarray(points).resize((width, height), Image.Resampling.BICUBIC))


def photograph(number, side):
    """Noise that is weaker the finer it is, as detail in photographs: colours of large areas, and lightness down to single pixels."""
    random = np.random.default_rng(number)
    shorter, longer = int(side * random.uniform(0.66, 0.84)), int(side * random.uniform(0.92, 1.08))
    height, width = (shorter, longer) if random.random() < 0.7 else (longer, shorter)
    light = sum(40 / cells**0.5 * noise(random, height, width, cells) for cells in (2, 5, 12, 30, 75, 190)) * 1.5
    light += random.standard_normal((height, width), dtype=np.float32) * 8
    colours = [sum(30 / cells**0.5 * noise(random, height, width, cells) for cells in (2, 6, 20)) for _ in range(3)]
    pixels = np.stack([120 + light + colour for colour in colours], 2)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def write(picture, folder, number, quality):
    folder.mkdir(parents=True, exist_ok=True)
    picture.save(folder / f"{number:05}.jpg", quality=quality)


def write_photographs(folder, count, side):
    for number in range(count):
        write(photograph(number, side), folder / f"class{number % 4}", number, 90)


def write_fashion(folder, *counts):
    for split, name, count in zip(("train", "val"), ("train", "t10k"), counts, strict=True):
        images, labels = (np.frombuffer(gzip.open(FASHION / f"{name}-{kind}-ubyte.gz").read(), np.uint8) for kind in ("images-idx3", "labels-idx1"))
        images, labels = images[16:].reshape(-1, 28, 28), labels[8:]
        if count > len(labels):
            sys.exit(f"pictures.py: {FASHION} has {len(labels)} pictures for {split}, fewer than {count}")
        for number in range(count):
            write(Image.fromarray(images[number]), folder / split / CLASSES[labels[number]], number, 95)


if __name__ == "__main__":
    what, folder, *counts = sys.argv[1:]
    {"photographs": write_photographs, "fashion": write_fashion}[what](pathlib.Path(folder), *map(int, counts))
