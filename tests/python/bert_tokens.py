"""bert_tokens.py FOLDER...: of each folder, writes what transformers' BertTokenizer makes of the texts in texts.json, a list, to tokens.json. The folders have
vocab.txt and tokenizer_config.json. Ends with status 3 without transformers."""
import json
import os
import sys

os.environ["HF_HUB_OFFLINE"] = "1"

try:
    from transformers import BertTokenizer, logging
except ImportError:
    sys.exit(3)

logging.set_verbosity_error()


def tokens_of(tokenizer, texts):
    pairs = list(zip(texts, texts[1:] + texts[:1]))

    def encode(*texts, **options):
        made = tokenizer(*texts, truncation="longest_first", **options)
        return [made["input_ids"], made["token_type_ids"], made["attention_mask"]]

    return {
        "tokens": [tokenizer.tokenize(text) for text in texts],
        "single": encode(texts, padding="longest", max_length=512),
        "single_short": encode(texts, padding="max_length", max_length=5),
        "pairs": [encode([a for a, _ in pairs], [b for _, b in pairs], padding="longest", max_length=length) for length in (3, 4, 9, 16, 512)],
    }


for folder in sys.argv[1:]:
    with open(f"{folder}/texts.json", encoding="utf-8") as file:
        texts = json.load(file)
    with open(f"{folder}/tokens.json", "w") as file:
        json.dump(tokens_of(BertTokenizer.from_pretrained(folder), texts), file)
