"""llama_files.py FOLDER: small Llamas, Mistrals, Qwens, SmolLMs, Gemmas and Phis of transformers with random weights, each in a folder of the Hugging Face Hub, with what they make
of some tokens, gradients of the loss, and a greedy continuation in expected.safetensors. llama_files.py steps FOLDER: one of them, and ten steps that PyTorch's FSDP2
takes with it on two ranks. Both end with status 3 without the package."""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file

try:
    from transformers import (Gemma2Config, Gemma2ForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM, MistralConfig,
                              MistralForCausalLM, MixtralConfig, MixtralForCausalLM, Phi3Config, Phi3ForCausalLM, Qwen2Config, Qwen2ForCausalLM,
                              Qwen2MoeConfig, Qwen2MoeForCausalLM, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM, SmolLM3Config,
                              SmolLM3ForCausalLM)
except ImportError:
    sys.exit(3)

SMALL = dict(vocab_size=64, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48, max_position_embeddings=64,
             bos_token_id=1, eos_token_id=2, pad_token_id=0)
PADDED = SMALL | dict(pad_token_id=5)  # a token of texts, as in SmolLM2, whose chats end in it
LENGTH, CONTINUED = 24, 12


def keep(folder, model):
    torch.manual_seed(7)
    tokens = torch.randint(3, model.config.vocab_size, (2, LENGTH))
    if model.config.pad_token_id > 2:  # whose row gets no gradient from what goes in
        tokens[:, ::5] = model.config.pad_token_id
    model.train()  # nothing is dropped out
    out = model(tokens, labels=tokens)
    out.loss.backward()
    gradients = {f"gradient of {name}": each.grad for name, each in model.named_parameters() if each.grad is not None}  # None: of experts that no token chose
    model.eval()
    # Where a text passes the original length, transformers 4.57 continues otherwise with its cache than without.
    has_long = "longrope" in str(model.config.to_dict())
    model.generation_config.eos_token_id = None  # so that it does not end early
    model.config.output_router_logits = False  # transformers can't compute the loss of routers with a cache
    with torch.no_grad():
        positions = torch.cat([torch.arange(LENGTH - 10), torch.arange(10)])[None]  # of two documents
        # transformers 4.57 lets tokens of Qwen2-MoE see other documents of their row.
        packed = {} if model.config.model_type == "qwen2_moe" else {"packed": model(tokens[:1], position_ids=positions, use_cache=False).logits}
        continued = model.generate(tokens[:1], attention_mask=torch.ones_like(tokens[:1]), max_new_tokens=CONTINUED, do_sample=False,
                                   use_cache=not has_long)
    save_file({"tokens": tokens, "logits": out.logits.detach(), "loss": out.loss.detach(), "continued": continued, **packed, **gradients}, f"{folder}/expected.safetensors")


def small(folder, kind, config):
    torch.manual_seed(len(folder))
    model = kind(config)
    for name, parameter in model.named_parameters():  # so that norms and biases matter, too
        torch.nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
    model.config._attn_implementation = "eager"  # which alone has softcaps
    model.save_pretrained(folder)
    keep(folder, model)


def split_phi3(folder):
    """The same model as a Llama, whose projections are apart. Of each head Phi 3 turns a part."""
    config = json.load(open(f"{folder}/config.json"))
    config.update(model_type="llama", architectures=["LlamaForCausalLM"], head_dim=config["hidden_size"] // config["num_attention_heads"], rope_scaling=None)
    json.dump(config, open(f"{folder}/config.json", "w"))
    heads, shared = config["num_attention_heads"], config["num_key_value_heads"]

    def apart(tensors):
        found = {}
        for name, tensor in tensors.items():
            if "qkv_proj" in name:
                parts = tensor.split([heads * config["head_dim"], *[shared * config["head_dim"]] * 2])
                found |= {name.replace("qkv_proj", part): each.clone() for part, each in zip(("q_proj", "k_proj", "v_proj"), parts)}
            elif "gate_up_proj" in name:
                found |= {name.replace("gate_up_proj", part): each.clone() for part, each in zip(("gate_proj", "up_proj"), tensor.chunk(2))}
            else:
                found[name] = tensor
        return found

    for file in ("model", "expected"):
        save_file(apart(load_file(f"{folder}/{file}.safetensors")), f"{folder}/{file}.safetensors")


def in_the_form_of_5(folder):
    """As transformers 5 writes it; the tests may run with one before it."""
    config = json.load(open(f"{folder}/config.json"))
    if "rope_parameters" in config:
        return
    rope = config.pop("rope_scaling", None) or {"rope_type": "default"}
    config["rope_parameters"] = {**rope, "rope_theta": config.pop("rope_theta")}
    if "rope_local_base_freq" in config:
        config["rope_parameters"] = {"full_attention": config["rope_parameters"], "sliding_attention": {"rope_type": "default", "rope_theta": config.pop("rope_local_base_freq")}}
    if "original_max_position_embeddings" in config:
        config["rope_parameters"]["original_max_position_embeddings"] = config["original_max_position_embeddings"]
    config["dtype"] = config.pop("torch_dtype", config.get("dtype", "float32"))
    json.dump(config, open(f"{folder}/config.json", "w"))


def train(rank, ranks, folder, port):
    """Ten steps of PyTorch's FSDP2 over gloo: each layer is a unit, and the rest is one."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    torch.set_num_threads(1)
    model = LlamaForCausalLM.from_pretrained(folder).train()
    mesh = dist.init_device_mesh("cpu", (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    tokens = load_file(f"{folder}/tokens.safetensors")["tokens"]  # {steps, ranks, rows, length}
    losses = []
    for step in range(len(tokens)):
        loss = model(tokens[step, rank], labels=tokens[step, rank]).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        losses.append(mean / ranks)
    weights = {name: each.full_tensor().detach() for name, each in model.named_parameters()}
    if rank == 0:
        save_file({"losses": torch.stack(losses), **{name: each.clone().contiguous() for name, each in weights.items()}}, f"{folder}/expected.safetensors")
    dist.destroy_process_group()


def steps(folder, ranks):
    import socket

    torch.manual_seed(1)
    LlamaForCausalLM(LlamaConfig(**PADDED, rope_scaling=LLAMA3)).save_pretrained(folder)
    save_file({"tokens": torch.randint(3, SMALL["vocab_size"], (10, ranks, 2, LENGTH))}, f"{folder}/tokens.safetensors")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(train, (ranks, folder, port), nprocs=ranks)


LLAMA3 = dict(rope_type="llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
if __name__ == "__main__":
    root = sys.argv[-1]
    if sys.argv[1] == "steps":
        steps(root, 2)
        sys.exit()
    small(f"{root}/llama", LlamaForCausalLM, LlamaConfig(**SMALL, rope_theta=500.0, rope_scaling=LLAMA3, head_dim=12, attention_bias=True, mlp_bias=True))
    small(f"{root}/llama5", LlamaForCausalLM, LlamaConfig(**SMALL, rope_scaling=LLAMA3))
    small(f"{root}/linear", LlamaForCausalLM, LlamaConfig(**{**SMALL, "num_key_value_heads": 4}, rope_scaling=dict(rope_type="linear", factor=2.0)))
    small(f"{root}/tied", LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=True))
    small(f"{root}/padded", LlamaForCausalLM, LlamaConfig(**PADDED))
    small(f"{root}/tied-padded", LlamaForCausalLM, LlamaConfig(**PADDED, tie_word_embeddings=True))
    small(f"{root}/mistral", MistralForCausalLM, MistralConfig(**SMALL, sliding_window=7))
    small(f"{root}/qwen2", Qwen2ForCausalLM, Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1))
    small(f"{root}/qwen3", Qwen3ForCausalLM, Qwen3Config(**SMALL, head_dim=16, tie_word_embeddings=True, rope_theta=1e6))
    small(f"{root}/smollm3", SmolLM3ForCausalLM, SmolLM3Config(**SMALL, no_rope_layer_interval=2))
    yarn = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
    small(f"{root}/yarn", Qwen2ForCausalLM, Qwen2Config(**SMALL, rope_scaling=yarn))
    small(f"{root}/yarn-whole", LlamaForCausalLM, LlamaConfig(**SMALL, head_dim=16, rope_theta=20.0,
                                                              rope_scaling=yarn | dict(beta_fast=3.0, beta_slow=0.5, truncate=False, mscale=1.0, mscale_all_dim=0.5)))
    few = SMALL | dict(num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=24, sliding_window=7)
    small(f"{root}/gemma2", Gemma2ForCausalLM, Gemma2Config(**few, attn_logit_softcapping=2.0, final_logit_softcapping=3.0))
    small(f"{root}/gemma3", Gemma3ForCausalLM, Gemma3TextConfig(**few, sliding_window_pattern=2, rope_scaling=dict(rope_type="linear", factor=2.0), rope_local_base_freq=100.0))
    in_the_form_of_5(f"{root}/gemma3")
    small(f"{root}/phi3", Phi3ForCausalLM, Phi3Config(**SMALL, sliding_window=9))
    long = SMALL | dict(num_hidden_layers=2, original_max_position_embeddings=29, partial_rotary_factor=0.75, tie_word_embeddings=True)  # the continuation passes this length
    factors = dict(type="longrope", short_factor=[1.0, 1.1, 1.3], long_factor=[1.5, 3.0, 8.0])
    small(f"{root}/phi4", Phi3ForCausalLM, Phi3Config(**long, rope_scaling=factors))
    small(f"{root}/phi4-long", Phi3ForCausalLM, Phi3Config(**long | dict(original_max_position_embeddings=16), rope_scaling=factors))
    in_the_form_of_5(f"{root}/phi4-long")
    small(f"{root}/partial", Phi3ForCausalLM, Phi3Config(**SMALL, partial_rotary_factor=0.5))
    split_phi3(f"{root}/partial")
    small(f"{root}/mixtral", MixtralForCausalLM, MixtralConfig(**SMALL, num_local_experts=6, output_router_logits=True, router_aux_loss_coef=0.5))
    moe = dict(moe_intermediate_size=24, num_experts=12, num_experts_per_tok=3)
    small(f"{root}/qwen2_moe", Qwen2MoeForCausalLM, Qwen2MoeConfig(**SMALL, **moe, shared_expert_intermediate_size=40, decoder_sparse_step=2))
    small(f"{root}/qwen3_moe", Qwen3MoeForCausalLM, Qwen3MoeConfig(**SMALL, **moe, head_dim=16, norm_topk_prob=True, mlp_only_layers=[1], output_router_logits=True))
    in_the_form_of_5(f"{root}/llama5")
