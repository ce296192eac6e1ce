"""transformers_files.py write|read FOLDER: a tiny GPT-2, in which two weights are tied, in the formats of training; then from the folder that was merged of
each."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
import torch.distributed.checkpoint as dcp
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

action, folder = sys.argv[1:]
tokens = torch.arange(12).view(2, 6)
if action == "write":
    torch.manual_seed(3)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()
    dcp.save({"model": model.state_dict()}, checkpoint_id=f"{folder}/dcp", no_dist=True)
    torch.save({"model": model.state_dict(), "step": 3}, f"{folder}/file.pt")
    torch.save(model(tokens).logits, f"{folder}/logits.pt")
    model.config.save_pretrained(f"{folder}/config")
else:
    expected = torch.load(f"{folder}/logits.pt", weights_only=True)
    for name in ("dcp", "file", "bin"):
        model, info = AutoModelForCausalLM.from_pretrained(f"{folder}/merged-{name}", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
        assert torch.equal(model.eval()(tokens).logits, expected), name
        assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()
