"""peft_files.py FOLDER: a small model, adapters that Python's peft has made for it, and what comes of them: base.safetensors, and for each case CASE/adapter_config.json,
CASE/adapter_model.safetensors (of "pickled" adapter_model.bin) and CASE.safetensors with outputs, gradients and merged weights. Ends with status 3 without the packages."""
import sys

try:
    import peft
    import torch
    from safetensors.torch import save_file
except ImportError:
    sys.exit(3)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(20, 12)
        self.a = torch.nn.Linear(12, 16)
        self.b = torch.nn.Linear(16, 12, bias=False)
        self.conv = torch.nn.Conv2d(1, 4, 3, padding=1)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.b(torch.relu(self.a(x)))
        x = self.conv(x.unsqueeze(1)).relu().mean(1)
        return self.head(x.mean(1))


CASES = {
    "lora": dict(r=4, lora_alpha=6, target_modules=["a", "b"]),
    "rslora": dict(r=4, lora_alpha=6, target_modules=["a"], use_rslora=True, bias="lora_only"),
    "dora": dict(r=3, lora_alpha=6, target_modules=["a", "b", "conv", "embed"], use_dora=True),
    "layers": dict(r=2, lora_alpha=2, target_modules=["conv", "embed", "head"], rank_pattern={"conv": 3}, alpha_pattern={"head": 5}),
    "biases": dict(r=2, lora_alpha=2, target_modules=["a"], bias="all", init_lora_weights="gaussian"),
    "pissa": dict(r=2, lora_alpha=4, target_modules=["a", "head"], init_lora_weights="pissa"),
    "whole": dict(r=2, lora_alpha=2, target_modules="a|b", modules_to_save=["head"]),
    "pickled": dict(r=2, lora_alpha=4, target_modules=["a", "embed"], use_dora=True, modules_to_save=["head"]),
}

folder = sys.argv[1]
torch.manual_seed(1)
base = Net().state_dict()
save_file(base, f"{folder}/base.safetensors")
tokens, weights = torch.randint(20, (6, 7)), torch.randn(6, 5)
for name, options in CASES.items():
    net = Net()
    net.load_state_dict(base)
    model = peft.get_peft_model(net, peft.LoraConfig(**options))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    model.save_pretrained(f"{folder}/{name}", safe_serialization=name != "pickled")
    out = model(tokens)
    (out * weights).sum().backward()
    found = {"tokens": tokens, "weights": weights, "out": out.detach()}
    for key, parameter in model.named_parameters():
        if parameter.grad is not None:
            found["grad." + key.removeprefix("base_model.model.").replace(".base_layer", "").replace("modules_to_save.default.", "")] = parameter.grad
    for key, value in model.merge_and_unload().state_dict().items():
        found["merged." + key] = value
    save_file({key: value.contiguous() for key, value in found.items()}, f"{folder}/{name}.safetensors")

# A LoRA and a DoRA that act together.
net = Net()
net.load_state_dict(base)
model = peft.get_peft_model(net, peft.LoraConfig(r=2, lora_alpha=4, target_modules=["a", "b"]), "mixed-lora")
model.add_adapter("mixed-dora", peft.LoraConfig(r=3, lora_alpha=6, target_modules=["a", "b"], use_dora=True))
with torch.no_grad():
    for key, parameter in model.named_parameters():
        if ".lora_" in key:
            parameter.add_(torch.randn_like(parameter) * 0.2)
model.save_pretrained(folder, selected_adapters=["mixed-lora", "mixed-dora"])
model.base_model.set_adapter(["mixed-lora", "mixed-dora"])
save_file({"tokens": tokens, "out": model(tokens).detach()}, f"{folder}/mixed.safetensors")
