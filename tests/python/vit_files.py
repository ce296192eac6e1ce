"""vit_files.py FOLDER: a small ViT of transformers with random weights, under the names of models::Vit in weights.safetensors, and in expected.safetensors
what it makes of some images, with the gradients of a loss. Ends with status 3 without the package."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import save_file

try:
    from transformers import ViTConfig, ViTForImageClassification
except ImportError:
    sys.exit(3)

NAMES = {"vit.embeddings.cls_token": "token", "vit.embeddings.position_embeddings": "positions", "vit.embeddings.patch_embeddings.projection": "patches",
         "vit.layernorm": "norm", "classifier": "head"}
OF_BLOCKS = {"layernorm_before": "norm1", "layernorm_after": "norm2", "attention.output.dense": "attention.out", "intermediate.dense": "up",
             "output.dense": "down"}


def renamed(tensors):
    """Queries, keys and values are one layer."""
    found = {}
    for name, tensor in tensors.items():
        prefix, _, rest = name.removeprefix("vit.encoder.layer.").partition(".") if name.startswith("vit.encoder") else (None, None, name)
        stem, _, end = rest.rpartition(".") if rest.endswith((".weight", ".bias")) else (rest, "", "")
        if prefix is None:
            found[".".join(filter(None, [NAMES[stem], end]))] = tensor
        elif stem.startswith("attention.attention."):
            found.setdefault(f"blocks.{prefix}.attention.qkv.{end}", []).append((["query", "key", "value"].index(stem.split(".")[-1]), tensor))
        else:
            found[f"blocks.{prefix}.{OF_BLOCKS[stem]}.{end}"] = tensor
    return {name: torch.cat([part for _, part in sorted(value, key=lambda each: each[0])]) if isinstance(value, list) else value.contiguous()
            for name, value in found.items()}


torch.manual_seed(1)
model = ViTForImageClassification(ViTConfig(hidden_size=24, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96, image_size=16, patch_size=4,
                                            num_labels=5, layer_norm_eps=1e-6)).eval()
for parameter in model.parameters():  # so that norms and biases matter, too
    torch.nn.init.normal_(parameter, std=0.2)
images = torch.randn(3, 3, 16, 16)
scores = model(images).logits
torch.nn.functional.cross_entropy(scores, torch.tensor([0, 3, 4])).backward()
gradients = {f"gradient of {name}": tensor for name, tensor in renamed({name: parameter.grad for name, parameter in model.named_parameters()}).items()}
save_file(renamed({name: value.detach() for name, value in model.state_dict().items()}), f"{sys.argv[1]}/weights.safetensors")
save_file({"images": images, "scores": scores.detach(), **gradients}, f"{sys.argv[1]}/expected.safetensors")
