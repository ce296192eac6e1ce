"""vit_files.py FOLDER PACKAGE: a small ViT of transformers, timm or torchvision with random weights, in weights.safetensors, and in expected.safetensors what it
makes of some images, with the gradients of a loss. The names are the package's own, except that those of transformers become those of models::Vit, because
it has queries, keys and values in three layers. Ends with status 3 without the package."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file

CLASSES = 5
NAMES = {"vit.embeddings.cls_token": "cls_token", "vit.embeddings.position_embeddings": "pos_embed",
         "vit.embeddings.patch_embeddings.projection": "patch_embed.proj", "vit.layernorm": "norm", "classifier": "head"}
OF_BLOCKS = {"layernorm_before": "norm1", "layernorm_after": "norm2", "attention.output.dense": "attn.proj", "intermediate.dense": "mlp.fc1",
             "output.dense": "mlp.fc2"}


def of_transformers():
    from transformers import ViTConfig, ViTForImageClassification

    model = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4,
                                                num_labels=CLASSES, layer_norm_eps=1e-6))
    return model, 16, lambda images: model(images).logits


def of_timm():
    import torchvision_python  # noqa: F401
    import timm

    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=CLASSES)
    return model, 224, model


def of_torchvision():
    import torchvision_python  # noqa: F401
    from torchvision.models import VisionTransformer

    model = VisionTransformer(image_size=32, patch_size=16, num_layers=2, num_heads=4, hidden_dim=48, mlp_dim=96, num_classes=CLASSES)
    return model, 32, model


def renamed(tensors):
    """Queries, keys and values are one layer."""
    found = {}
    for name, tensor in tensors.items():
        if not name.startswith("vit.encoder"):
            stem, _, end = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
            found[".".join(filter(None, [NAMES[stem], end]))] = tensor
            continue
        block, _, rest = name.removeprefix("vit.encoder.layer.").partition(".")
        stem, _, end = rest.rpartition(".")
        if stem.startswith("attention.attention."):
            found.setdefault(f"blocks.{block}.attn.qkv.{end}", []).append((["query", "key", "value"].index(stem.split(".")[-1]), tensor))
        else:
            found[f"blocks.{block}.{OF_BLOCKS[stem]}.{end}"] = tensor
    return {name: torch.cat([part for _, part in sorted(value, key=lambda each: each[0])]) if isinstance(value, list) else value.contiguous()
            for name, value in found.items()}


folder, package = sys.argv[1:]
torch.manual_seed(1)
try:
    model, size, scores_of = {"transformers": of_transformers, "timm": of_timm, "torchvision": of_torchvision}[package]()
except ImportError:
    sys.exit(3)
names = renamed if package == "transformers" else dict
model.eval()
for parameter in model.parameters():  # so that norms and biases matter, too
    torch.nn.init.normal_(parameter, std=0.2 if parameter.dim() == 1 else (parameter.numel() / parameter.size(0)) ** -0.5)
images = torch.randn(3, 3, size, size)
scores = scores_of(images)
torch.nn.functional.cross_entropy(scores, torch.tensor([0, 3, 4])).backward()
gradients = {f"gradient of {name}": tensor for name, tensor in names({name: parameter.grad for name, parameter in model.named_parameters()}).items()}
save_file(names({name: value.detach() for name, value in model.state_dict().items()}), f"{folder}/weights.safetensors")
save_file({"images": images, "scores": scores.detach(), **gradients}, f"{folder}/expected.safetensors")
