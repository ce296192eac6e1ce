"""adapter_steps.py FOLDER: a tiny Llama, and ten steps of Python's peft on it for each method, of which METHOD-start and METHOD-end are the adapters and
steps.safetensors has tokens and losses. QLoRA is that of bitsandbytes. Ends with status 3 without the packages."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

try:
    import bitsandbytes  # noqa: F401
    import peft
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM
except ImportError:
    sys.exit(3)

folder = sys.argv[1]
torch.manual_seed(1)
config = LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
                     max_position_embeddings=32, bos_token_id=0, eos_token_id=1)
LlamaForCausalLM(config).save_pretrained(folder)
tokens = torch.randint(96, (10, 6, 12))
found = {"tokens": tokens}
for method in ("lora", "dora", "qlora", "qdora", "lora-bf16", "dora-bf16", "qlora-bf16"):
    dtype = torch.bfloat16 if method.endswith("-bf16") else torch.float32
    nf4 = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    options = dict(quantization_config=nf4, device_map={"": "cpu"}) if method.startswith("q") else {}
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, **options)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", use_dora="dora" in method))
    model.train()  # in evaluation bitsandbytes computes in bfloat16 on some CPUs
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    with torch.no_grad():
        for parameter in trained:
            parameter.add_(torch.randn_like(parameter) * 0.05)
    model.save_pretrained(f"{folder}/{method}-start")
    optimizer = torch.optim.AdamW(trained, lr=1e-2, weight_decay=0)
    losses = []
    for step in tokens:
        loss = model(step, labels=step).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().float())
    model.save_pretrained(f"{folder}/{method}-end")
    found[method] = torch.stack(losses)
save_file(found, f"{folder}/steps.safetensors")
