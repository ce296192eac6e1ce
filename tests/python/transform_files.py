"""transform_files.py FOLDER: pictures and what torchvision's transforms make of them, in FOLDER/expected.safetensors. `picture/N` is a picture, and
`N/OPERATION/NUMBERS` the result of the operation with these numbers. Random transforms get the draws of vision::Draws with a seed. Ends with status 3
without torchvision."""
import contextlib
import math
import sys
import types
from unittest import mock

import torch
from safetensors.torch import save_file

try:
    import torchvision_python
    from torchvision.transforms import v2
    from torchvision.transforms.v2 import functional as F
    from torchvision.transforms.v2.functional._geometry import _get_inverse_affine_matrix
except ImportError:
    sys.exit(3)

MASK = 2**64 - 1
GOLDEN = 0x9e3779b97f4a7c15


def scramble(value):
    value = (value + GOLDEN) & MASK
    value = ((value ^ (value >> 30)) * 0xbf58476d1ce4e5b9) & MASK
    value = ((value ^ (value >> 27)) * 0x94d049bb133111eb) & MASK
    return value ^ (value >> 31)


class Draws:
    """vision::Draws"""

    def __init__(self, seed):
        self.state = scramble(seed)

    def next(self):
        value = scramble(self.state)
        self.state = (self.state + GOLDEN) & MASK
        return value

    def uniform(self, begin, end):
        return begin + (end - begin) * ((self.next() >> 11) * 2.0**-53)

    def below(self, n):
        return self.next() % n


@contextlib.contextmanager
def draws(seed):
    """Has torch draw from Draws, in double precision."""
    source = Draws(seed)
    number = lambda value: torch.tensor(value, dtype=torch.float64)

    def randint(*ends, size=None):
        ends = [end for end in ends if isinstance(end, int)]
        return torch.tensor(ends[0] + source.below(ends[1] - ends[0]) if len(ends) == 2 else source.below(ends[0]))

    def randperm(n):
        order = list(range(n))
        for i in range(n - 1, 0, -1):
            other = source.below(i + 1)
            order[i], order[other] = order[other], order[i]
        return torch.tensor(order)

    with mock.patch.object(torch.Tensor, "uniform_", lambda self, begin, end: number(source.uniform(float(begin), float(end)))), \
            mock.patch("torch.rand", lambda *size: number(source.uniform(0, 1))), mock.patch("torch.randint", randint), \
            mock.patch("torch.randperm", randperm):
        yield


def pictures():
    """Noise, smooth colours, few colours, one colour; of odd sizes, and too small for some operations."""
    torch.manual_seed(1)
    for height, width in [(37, 53), (64, 41), (90, 120), (3, 3), (2, 9), (1, 1), (5, 1)]:
        yield torch.randint(0, 256, (height, width, 3))
    height, width = 71, 130
    x, y = torch.linspace(0, 1, width)[None], torch.linspace(0, 1, height)[:, None]
    yield torch.stack([200 * x + 0 * y, 30 + 100 * x * y, 255 - 128 * y + 0 * x], -1) + 5 * torch.rand(height, width, 3) - 5
    yield torch.randint(0, 2, (33, 47, 3)) * torch.tensor([255, 30, 1])
    yield torch.full((9, 11, 3), 77)
    yield torch.stack(torch.meshgrid(torch.arange(256), torch.arange(200), indexing="ij") + (torch.full((256, 200), 250),), -1)[:, :, [2, 1, 0]]


def is_decisive(image, angle, translate, shear, center):
    """Whether no pixel comes from so near to the middle between two others that the rounding of another BLAS library matters."""
    height, width = image.shape[-2:]
    a, b, c, d, e, f = _get_inverse_affine_matrix(center, angle, translate, 1.0, shear)
    x, y = torch.arange(width).double()[None] - (width - 1) / 2, torch.arange(height).double()[:, None] - (height - 1) / 2
    return all(((at - 0.5) - (at - 0.5).round()).abs().min() > 3e-5
               for at in (a * x + b * y + c + (width - 1) / 2, d * x + e * y + f + (height - 1) / 2))


def is_decisive_operation(image, name, magnitude):
    corner = [-0.5 * image.shape[-1], -0.5 * image.shape[-2]]
    slope = math.degrees(math.atan(magnitude))
    if name == "ShearX":
        return is_decisive(image, 0.0, [0, 0], [slope, 0.0], corner)
    if name == "ShearY":
        return is_decisive(image, 0.0, [0, 0], [0.0, slope], corner)
    return name != "Rotate" or is_decisive(image, -(magnitude % 360), [0, 0], [0.0, 0.0], [0.0, 0.0])


torch.set_num_threads(1)
found = {}
magnitudes = {"ShearX": [0.09, -0.09, 0.2971, -0.13, 1.7], "ShearY": [0.09, -0.21, 0.2971, 0.13], "TranslateX": [7.9, -3.2, 0, 500],
              "TranslateY": [7.9, -3.2, -11], "Rotate": [9, -9, 30, -17.3, 0, 180, 123.4], "Posterize": [0, 1, 4, 7, 8], "Solarize": [0, 0.3, 0.7, 1],
              "AutoContrast": [0], "Equalize": [0], "Identity": [0]}
factors = [0, 0.1, 0.37, 0.9, 1, 1.0001, 1.27, 1.9, 2.3]
augment = v2.RandAugment()
names = list(augment._AUGMENTATION_SPACE)
drawn_seeds = 12
for n, values in enumerate(pictures()):
    image = values.to(torch.uint8).contiguous().permute(2, 0, 1)
    height, width = image.shape[-2:]
    found[f"picture/{n}"] = image

    def keep(operation, numbers, result):
        found[f"{n}/{operation}/{','.join(repr(float(number)) for number in numbers)}"] = result

    for size in [(17, 31), (height, 20), (40, width), (2 * height, 3 * width), (height // 2 + 1, 1)]:
        for mode in ("bilinear", "bicubic"):
            keep(mode, size, F.resize(image, list(size), interpolation=mode))
    for side in (7, 50):
        keep("shorter_side", [side], F.resize(image, [side]))
    for top, left, box_height, box_width in [(0, 0, height, width), (height // 3, width // 4, height // 2 + 1, width // 2 + 1), (-2, 1, 7, 9),
                                             (1, -3, height, width)]:
        keep("crop", [top, left, box_height, box_width], F.crop(image, top, left, box_height, box_width))
        part = F.crop(image, top, left, box_height, box_width)
        keep("resized_crop", [top, left, box_height, box_width, 19, 23], F.resize(part, [19, 23]))
    for size in [(20, 21), (31, 44), (60, 30), (100, 100), (1, 2), (2, 1)]:
        keep("center_crop", size, F.center_crop(image, list(size)))
    keep("flip", [], F.horizontal_flip(image))
    for operation in ("brightness", "contrast", "saturation", "sharpness"):
        for factor in factors:
            keep(operation, [factor], getattr(F, f"adjust_{operation}")(image, factor))
    for factor in [-0.5, -0.3, -0.1, -1e-9, 0, 0.05, 0.123, 0.25, 0.4999, 0.5]:
        keep("hue", [factor], F.adjust_hue(image, factor))
    for operation, of_operation in magnitudes.items():
        for magnitude in of_operation:
            if is_decisive_operation(image, operation, magnitude):
                keep("augment", [names.index(operation), magnitude],
                     augment._apply_image_or_video_transform(image, operation, magnitude, "nearest", augment._fill))
    keep("normalize", [], F.normalize(F.to_dtype(image, torch.float32, scale=True), [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))

    jitters = [(0.4, 0.4, 0.4, 0.1), (1.5, 0, 0.2, 0), (0, 0.3, 0, 0.5)]
    for seed in range(drawn_seeds):
        options = jitters[seed % len(jitters)]
        with draws(seed):
            keep("jitter", [seed, *options], v2.ColorJitter(*options)(image))
        operations, magnitude = [(2, 9), (3, 30), (1, 17)][seed % 3]
        drawn = v2.RandAugment(num_ops=operations, magnitude=magnitude)
        apply, decisive = drawn._apply_image_or_video_transform, []

        def watched(image, name, magnitude, **others):
            decisive.append(is_decisive_operation(image, name, magnitude))
            return apply(image, name, magnitude, **others)

        drawn._apply_image_or_video_transform = watched
        with draws(seed):
            result = drawn(image)
        if all(decisive):
            keep("rand_augment", [seed, operations, magnitude], result)

# Boxes, of images of ordinary, wide, high and tiny sizes, and of areas and shapes that no box can have.
rows = []
for seed in range(300):
    height, width = [(375, 500), (500, 333), (1000, 20), (16, 900), (1, 1), (31, 32)][seed % 6]
    scale, ratio = [((0.08, 1), (3 / 4, 4 / 3)), ((0.9, 1), (1, 1)), ((0.5, 0.6), (0.2, 6)), ((1, 1), (0.99, 1.01))][seed // 6 % 4]
    crop = v2.RandomResizedCrop(10, scale=scale, ratio=ratio)
    crop._log_ratio = torch.tensor([math.log(each) for each in ratio], dtype=torch.float64)
    with draws(seed):
        box = crop.make_params([torch.empty(3, height, width, device="meta")])
    rows.append([seed, height, width, *scale, *ratio, box["top"], box["left"], box["height"], box["width"]])
found["boxes"] = torch.tensor(rows, dtype=torch.float64)

images, labels = torch.randn(5, 3, 13, 17), torch.tensor([0, 3, 1, 1, 2])
rows = []
for seed in range(100):
    height, width, share = [(224, 224), (13, 17), (1, 5)][seed % 3] + (seed / 100,)
    cut = v2.CutMix(num_classes=4)
    cut._dist = types.SimpleNamespace(sample=lambda shape: share)
    with draws(seed):
        x1, y1, x2, y2 = cut.make_params([torch.empty(1, 3, height, width, device="meta")])["box"]
    rows.append([seed, height, width, share, y1, x1, y2 - y1, x2 - x1])
found["cuts"] = torch.tensor(rows, dtype=torch.float64)
up, cut = v2.MixUp(num_classes=4), v2.CutMix(num_classes=4)
up.make_params = lambda flat: {"lam": 0.3}
cut.make_params = lambda flat: {"box": (2, 3, 12, 7), "lam_adjusted": 1 - 10 * 4 / (13 * 17)}
found |= {"mix/inputs": images, "mix/labels": labels}
found["mixup/inputs"], found["mixup/targets"] = up(images, labels)
found["cutmix/inputs"], found["cutmix/targets"] = cut(images, labels)
save_file({name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in found.items()}, f"{sys.argv[1]}/expected.safetensors")
