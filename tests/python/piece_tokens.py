"""piece_tokens.py FOLDER: SentencePiece's tokenizers, each in a folder: as tokenizer.json of families of models with what Hugging Face's library tokenizers
makes of odd texts, and as tokenizer.model with what sentencepiece makes of them. Ends with status 3 without the packages."""
import io
import json
import os
import pydoc_data.topics
import random
import sys

import torch
from safetensors.torch import save_file

try:
    import sentencepiece
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
except ImportError:
    sys.exit(3)

from bpe_tokens import CORPUS, joined, keep, odd_texts

SPECIAL = ["<unk>", "<s>", "</s>"]
USER = ["<turn>", "\u2581\u2581", "\u2581\u2581\u2581\u2581", "\n\n", "[user]"]
MORE = [*SPECIAL, *USER, "<turn>", "<|user|>", "<|user|> \n", " <mask>", "<mask> x", "<0x41>", "<0x0A>", "\u2581", " \u2581", "\u2581the", "        ", "\n\n", "hello", " world", " import",
        "def ", "ing", "ﬁ", "Å", "①", "ｆｕｌｌ", "㍿", "\r\n", "e\u0301\u0323", "ﷺ", "\u200b", "\u200d", "\u00ad", "한국어", "ไทย", "हिन्दी", "𝒳", "\U0001F600"]


def trained(name, **options):
    made = io.BytesIO()
    lines = [line for text in pydoc_data.topics.topics.values() for line in text.splitlines() if line.strip()][:1500] + CORPUS * 4
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=made, minloglevel=2, num_threads=1, **options)
    os.mkdir(name)
    with open(f"{name}/tokenizer.model", "wb") as file:
        file.write(made.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())


def table_of(path):
    """precompiled_charsmap: field 2 of the message in field 3."""
    def fields(data):
        at = 0
        def number():
            nonlocal at
            value = shift = 0
            while True:
                byte = data[at]
                at += 1
                value |= (byte & 127) << shift
                shift += 7
                if byte < 128:
                    return value
        while at < len(data):
            tag = number()
            if tag & 7 == 0:
                yield tag >> 3, number()
                continue
            size = number() if tag & 7 == 2 else 4 if tag & 7 == 5 else 8
            yield tag >> 3, data[at:at + size]
            at += size
    spec = b"".join(value for field, value in fields(open(path, "rb").read()) if field == 3)
    return next(value for field, value in fields(spec) if field == 2)


def vocabulary(model):
    return [(model.id_to_piece(i), model.get_score(i)) for i in range(model.vocab_size())]


def merges(pieces):
    """As transformers makes them."""
    known, scores = {piece: i for i, (piece, _) in enumerate(pieces)}, dict(pieces)
    found = []
    for piece, score in scores.items():
        local = [(piece[:i], piece[i:], score) for i in range(1, len(piece)) if piece[:i] in known and piece[i:] in known]
        found += sorted(local, key=lambda each: (known[each[0]], known[each[1]]))
    found.sort(key=lambda each: (each[2], len(each[0]), len(each[1])), reverse=True)
    return [(left, right) for left, right, _ in found]


def pairs(model, **options):
    pieces = vocabulary(model)
    return Tokenizer(models.BPE({piece: i for i, (piece, _) in enumerate(pieces)}, merges(pieces), **{"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, **options}))


def finished(tokenizer, normalizer=None, pre=None, strip=True, added=(), decoder=None, end=None):
    if normalizer is not None:
        tokenizer.normalizer = normalizers.Sequence(normalizer)
    if pre is not None:
        tokenizer.pre_tokenizer = pre
    tokenizer.decoder = decoder or decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if strip else [])])
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens(list(added))
    template = "$A </s>" if end else "<s> $A"
    tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


LLAMA = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]


def metaspace(scheme, split):
    return pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)


def unigram(model, **options):
    return Tokenizer(models.Unigram(vocabulary(model), unk_id=0, **options))


def families(llama, gemma, t5, table):
    plain = {"unk_token": "<unk>", "byte_fallback": False}
    turns = [AddedToken("<|user|>", rstrip=True, normalized=False, special=True), AddedToken("<turn>", rstrip=True, normalized=False)]
    users = [AddedToken(token, normalized=False) for token in USER]
    strip = [normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "\u2581")]
    return {
        "llama2": finished(pairs(llama), LLAMA),
        "llama2_normalized": finished(pairs(llama), LLAMA, added=[AddedToken("<turn>", normalized=True), AddedToken("hello", single_word=True)]),
        "mistral3": finished(pairs(llama), pre=metaspace("first", False), added=users),
        "tinyllama": finished(pairs(llama, ignore_merges=True), pre=metaspace("always", False)),
        "phi3": finished(pairs(llama), LLAMA, added=turns),
        "gemma": finished(pairs(gemma), [normalizers.Replace(" ", "\u2581")], pre_tokenizers.Split(" ", "merged_with_previous"), strip=False, added=users),
        "words": finished(pairs(llama, **plain, fuse_unk=True), pre=metaspace("always", True), decoder=decoders.Metaspace()),
        "t5": finished(unigram(t5), [normalizers.Precompiled(table)], pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), metaspace("always", True)]), decoder=decoders.Metaspace(), end=True),
        "xlmr": finished(unigram(t5), [normalizers.Precompiled(table), *strip], metaspace("always", True), added=[AddedToken("<mask>", lstrip=True, special=True)], decoder=decoders.Metaspace()),
    }


if __name__ == "__main__":
    root, count = sys.argv[1], int(os.environ.get("TESSERA_TEST_TEXTS", 400))
    source = random.Random(6)
    texts, drawn = odd_texts(count, source, MORE), source.randbytes(20_000)
    os.chdir(root)
    text, ends = joined(texts, torch.uint8)
    save_file({"bytes": text, "ends": ends, "drawn": torch.frombuffer(bytearray(drawn), dtype=torch.uint8)}, "texts.safetensors")
    shared = {"model_type": "bpe", "vocab_size": 1500, "byte_fallback": True, "split_digits": True, "allow_whitespace_only_pieces": True, "normalization_rule_name": "identity",
              "remove_extra_whitespaces": False, "character_coverage": 0.999}
    of_models = {
        "model_llama": trained("model_llama", **shared),
        "model_gemma": trained("model_gemma", **shared, add_dummy_prefix=False, user_defined_symbols=USER),
        "model_t5": trained("model_t5", model_type="unigram", vocab_size=1200, normalization_rule_name="nmt_nfkc", character_coverage=0.999),
        "model_bytes": trained("model_bytes", model_type="unigram", vocab_size=1500, byte_fallback=True, normalization_rule_name="nmt_nfkc_cf", add_dummy_prefix=False),
    }
    for name, tokenizer in families(of_models["model_llama"], of_models["model_gemma"], of_models["model_t5"], table_of("model_t5/tokenizer.model")).items():
        os.mkdir(name)
        keep(tokenizer, texts, drawn, name)
    for name, model in of_models.items():
        # Special tokens and texts before user-defined tokens differ by design: this library reads special tokens in texts.
        own = [text for text in texts if not any(token.encode() in text for token in SPECIAL)]
        strings = [text.decode("utf-8", errors="replace") for text in own]
        ids = model.encode(strings)
        decoded = [model.decode(each).replace(" \u2047 ", "<unk>") for each in ids]
        text, ends = joined(own, torch.uint8)
        save_file({"bytes": text, "ends": ends, "drawn": torch.frombuffer(bytearray(drawn), dtype=torch.uint8)}, f"{name}/texts.safetensors")
        all_ids, id_ends = joined(ids, torch.int32)
        all_text, text_ends = joined([text.encode() for text in decoded], torch.uint8)
        of_drawn = model.encode(drawn.decode("utf-8", errors="replace"))
        save_file({"ids": all_ids, "ends": id_ends, "decoded": all_text, "decoded_ends": text_ends, "drawn": torch.tensor(of_drawn, dtype=torch.int32)}, f"{name}/tokens.safetensors")
        with open(f"{name}/tokenizer_config.json", "w") as file:
            json.dump({"add_bos_token": False, "add_eos_token": False}, file)
