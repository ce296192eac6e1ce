"""quantize_files.py FILE: weights and what bitsandbytes makes of them in 4 bits, and in 8 bits of its dynamic code. Ends with status 3 without the packages."""
import sys

try:
    import bitsandbytes.functional as bnb
    import torch
    from bitsandbytes.optim import AdamW8bit
    from safetensors.torch import save_file
except ImportError:
    sys.exit(3)

torch.manual_seed(1)
# Rows are odd or whole blocks: of others bitsandbytes 0.50.2 takes wrong scales on the way back on a CPU with AVX-512.
weights = {
    "square": torch.randn(256, 256) * 0.02,
    "odd": torch.randn(17, 5),
    "wide": torch.randn(100, 391),
    "zeros": torch.cat([torch.zeros(2, 64), torch.randn(3, 64), torch.zeros(1, 64)]),
    "narrow": torch.randn(96, 192).to(torch.bfloat16),
}
found = {}
for name, weight in weights.items():
    found[name] = weight
    for kind, nested in (("nf4", True), ("nf4_single", False)):
        codes, state = bnb.quantize_4bit(weight, blocksize=64, compress_statistics=nested, quant_type="nf4")
        found[f"{name}.{kind}.codes"] = codes.flatten()
        found[f"{name}.{kind}.scales"] = state.absmax.flatten()
        if nested:
            found[f"{name}.{kind}.nested"] = state.state2.absmax.flatten()
            found[f"{name}.{kind}.mean"] = state.offset.reshape(1)
        found[f"{name}.{kind}.values"] = bnb.dequantize_4bit(codes, state)
values = torch.randn(3000) * torch.rand(3000) ** 4
values[512:768] = 0
found["dynamic"] = values
for name, signed in (("signed", True), ("unsigned", False)):
    these = values if signed else values.abs()
    codes, state = bnb.quantize_blockwise(these, code=bnb.create_dynamic_map(signed), blocksize=256)
    found[f"dynamic.{name}.codes"], found[f"dynamic.{name}.scales"] = codes, state.absmax
# The steps of an optimizer: a weight in blocks of which the last one is short, and a bias that is too small for blocks.
weight, bias = (torch.nn.Parameter(torch.randn(*sizes)) for sizes in ((50, 101), (50,)))
optimizer = AdamW8bit([weight, bias], lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
found["steps.weight"], found["steps.bias"] = weight.detach().clone(), bias.detach().clone()
for step in range(10):
    for name, parameter in (("weight", weight), ("bias", bias)):
        parameter.grad = torch.randn_like(parameter) * torch.rand(parameter.shape[0]).view(-1, *[1] * (parameter.dim() - 1)) ** 3
        found[f"steps.{name}.{step}"] = parameter.grad
    optimizer.step()
state = optimizer.state[weight]
found["steps.weight.after"], found["steps.bias.after"] = weight.detach(), bias.detach()
found["steps.first"], found["steps.second"] = state["state1"].flatten(), state["state2"].flatten()
found["steps.first_scales"], found["steps.second_scales"] = state["absmax1"], state["absmax2"]
save_file({name: value.contiguous() for name, value in found.items()}, sys.argv[1])
