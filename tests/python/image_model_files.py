"""image_model_files.py WHAT FOLDER: what networks of torchvision and timm are, beside those that models::make_image_model makes by the same names. Ends with
status 3 without these packages.

names    expected.txt: a line for each parameter and buffer of each network: the network, the name, the sizes
scores   expected.safetensors: scores of images, and of a training step the loss, its gradients and the statistics of batch norms after it, in double
         precision, as batch norms of so few values enlarge rounding a thousandfold; resnet18.pth: the weights of one of these networks before, in float32
large    the same of the largest networks, in float32
initial  expected.safetensors: means and deviations of initial weights, drawn from seed 3"""
import math
import sys
import warnings

import torch

try:
    import torchvision_python  # noqa: F401  before torchvision
    import timm
    import torchvision
except ImportError:
    sys.exit(3)
from safetensors.torch import save_file

warnings.filterwarnings("ignore")

VITS = [f"vit_{size}_224" for size in ("tiny_patch16", "small_patch16", "base_patch16", "large_patch16", "huge_patch14", "giant_patch14")]
NAMES = ["alexnet", "densenet121", "densenet161", "densenet169", "densenet201", "inception_v3", "resnet18", "resnet34", "resnet50", "resnet101", "resnet152",
         "squeezenet1_0", "squeezenet1_1", "vgg11", "vgg11_bn", "vgg13", "vgg13_bn", "vgg16", "vgg16_bn", "vgg19", "vgg19_bn", "vit_b_16", *VITS]
# With the height and width of images, as small as the networks take them.
SCORED = {"resnet18": 48, "resnet50": 48, "squeezenet1_1": 48, "densenet121": 64, "inception_v3": 107, "vit_tiny_patch16_224": 48}
LARGE = {"alexnet": 64, "vgg11_bn": 32}
INITIAL = ["alexnet", "resnet18", "squeezenet1_1", "densenet121", "inception_v3", "vit_tiny_patch16_224"]


def make(name, classes=1000, image=224, initial=False):
    if name in VITS:
        return timm.create_model(name, num_classes=classes, img_size=image)
    more = {"aux_logits": False, "init_weights": initial, "transform_input": False} if name == "inception_v3" else {}
    return torchvision.models.get_model(name, num_classes=classes, **more)


def make_empty(*what):
    with torch.device("meta"):
        return make(*what)


def fill(state):
    """Gives tensors values by draws that the test repeats, such that a layer's results have about the size of what it is given."""
    torch.manual_seed(7)
    for name in sorted(state):
        tensor = state[name]
        if not tensor.is_floating_point():
            tensor.zero_()
        elif tensor.dim() > 1:
            bound = math.sqrt(3 * tensor.size(0) / tensor.numel())
            tensor.uniform_(-bound, bound)
        else:
            tensor.uniform_(-0.2, 0.2)
            if name.endswith(("weight", "running_var")):
                tensor.add_(1)


def samples(tensor):
    return tensor.detach().flatten()[::max(1, tensor.numel() // 100)].clone()


def names(folder):
    with open(f"{folder}/expected.txt", "w") as file:
        for name in NAMES:
            for tensor, value in make_empty(name).state_dict().items():
                print(name, tensor, ", ".join(map(str, value.shape)), file=file)


def scores(folder, networks=SCORED, dtype=torch.float64):
    found = {}
    for name, image in networks.items():
        model = make_empty(name, 10, image).to(dtype).to_empty(device="cpu").eval()
        fill(model.state_dict())
        if name == "resnet18":
            torch.save({key: value.float() if value.is_floating_point() else value for key, value in model.state_dict().items()}, f"{folder}/{name}.pth")
        images = found[f"{name} images"] = torch.randn(3, 3, image, image, generator=torch.Generator().manual_seed(8), dtype=dtype)
        with torch.no_grad():
            found[f"{name} scores"] = model(images)
        if name == "alexnet":
            continue
        for module in model.train().modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        loss = torch.nn.functional.cross_entropy(model(images), torch.arange(len(images)))
        loss.backward()
        found[f"{name} loss"] = loss.detach()
        found.update({f"{name} gradient of {parameter}": samples(value.grad) for parameter, value in model.named_parameters()})
        found.update({f"{name} {buffer}": samples(value) for buffer, value in model.named_buffers()})
    save_file(found, f"{folder}/expected.safetensors")


def large(folder):
    scores(folder, LARGE, torch.float32)


def initial(folder):
    found = {}
    for name in INITIAL:
        torch.manual_seed(3)
        for parameter, value in make(name, initial=True).named_parameters():
            value = value.detach().double()
            found[f"{name} {parameter}"] = torch.stack([value.mean(), value.std(correction=0)])
    save_file(found, f"{folder}/expected.safetensors")


if __name__ == "__main__":
    {"names": names, "scores": scores, "large": large, "initial": initial}[sys.argv[1]](sys.argv[2])
