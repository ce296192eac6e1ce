"""Runs the recipe for language models as a person would: from lines of text to a model that others read. llama.py TESSERA LLAMA PYTHON [unittest arguments]"""
import json
import math
import os
import random
import re
import sys
import unittest

from recipe import Recipe, losses

TESSERA, LLAMA, PYTHON = sys.argv[1:4]
CONFIG = """distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_activation_checkpointing: {checkpointing}
gradient_accumulation_steps: 2
num_processes: 2
"""
MODEL = dict(model_type="llama", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             max_position_embeddings=256, rope_theta=10000.0, eos_token_id=257, bos_token_id=256)
READ = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder = sys.argv[1]
model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
tokenizer = AutoTokenizer.from_pretrained(folder)
made = tokenizer("a b c d e f g h", return_tensors="pt")
with torch.no_grad():
    out = model.eval().generate(made.input_ids, attention_mask=made.attention_mask, max_new_tokens=12, do_sample=False, pad_token_id=0)
print(tokenizer.decode(out[0], skip_special_tokens=True))
import gguf
from gguf.quants import dequantize
reader = gguf.GGUFReader(sys.argv[2])
values = {tensor.name: torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy()) for tensor in reader.tensors}
state = model.state_dict()
assert torch.equal(values["blk.1.ffn_down.weight"], state["model.layers.1.mlp.down_proj.weight"])
assert reader.fields["tokenizer.ggml.pre"].contents() == "gpt-2", reader.fields["tokenizer.ggml.pre"].contents()
"""


# All rows are in each step, so their order plays no part. The Trainer divides by the labels of a step, of which the first one of a row is never learned.
CURVE = """
import json, sys, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
rows = [torch.tensor([*json.loads(line)["text"].encode(), 257]) for line in open(sys.argv[2])]
pad = lambda rows, value: torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=value)
labels = lambda row: torch.cat([torch.tensor([-100]), row[1:]])
collate = lambda rows: dict(input_ids=pad(rows, 0), labels=pad([labels(row) for row in rows], -100), attention_mask=pad([torch.ones_like(row) for row in rows], 0))
trainer = Trainer(model=model, train_dataset=rows, data_collator=collate, args=TrainingArguments(
    "trained", per_device_train_batch_size=2, gradient_accumulation_steps=4, num_train_epochs=5, learning_rate=0.003, lr_scheduler_type="cosine", adam_beta2=0.95,
    weight_decay=0.0, max_grad_norm=0.0, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True, remove_unused_columns=False))
trainer.train()
print(json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))
"""


def letters():
    """How GPT-2 writes bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(256)]


def write_model(folder):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    byte_level = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    marks = [dict(id=256 + i, content=mark, single_word=False, lstrip=False, rstrip=False, normalized=False, special=True) for i, mark in enumerate(("<s>", "</s>"))]
    vocabulary = {letter: byte for byte, letter in enumerate(letters())}
    (folder / "tokenizer.json").write_text(json.dumps(dict(
        version="1.0", truncation=None, padding=None, added_tokens=marks, normalizer=None, pre_tokenizer=byte_level, post_processor=None, decoder=byte_level,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=False, byte_fallback=False, vocab=vocabulary, merges=[]))))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(tokenizer_class="PreTrainedTokenizerFast", eos_token="</s>")))


READ_ADAPTER = """
import sys, peft, torch
from transformers import AutoModelForCausalLM
base, adapter, merged = sys.argv[1:]
ours = AutoModelForCausalLM.from_pretrained(merged, dtype=torch.float32).eval()
theirs = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), adapter).eval()
plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
tokens = torch.arange(40, 60).view(2, 10)
with torch.no_grad():
    print(*((ours(tokens).logits - other(tokens).logits).abs().max().item() for other in (theirs, plain)))
"""


DECAYED = """
import sys, torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer
expected = set(Trainer.get_decay_parameter_names(None, AutoModelForCausalLM.from_pretrained(sys.argv[1])))
one, other = (load_file(f"{folder}/model.safetensors") for folder in sys.argv[1:])
changed = {name for name in one if not torch.equal(one[name], other[name])}
assert changed == expected, changed ^ expected
print(len(one) - len(expected), "parameters do not decay")
"""


# An adapter of peft and pairs, and what is learned from them: by the formulas of TRL, and with the groups of LoRA+.
METHODS = """
import json, math, random, torch, peft
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM
from peft.optimizers import create_loraplus_optimizer
base = lambda: AutoModelForCausalLM.from_pretrained("base", dtype=torch.float32)
torch.manual_seed(1)
config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"down_proj": 3}, task_type="CAUSAL_LM")
given = peft.get_peft_model(base(), config)
for name, parameter in given.named_parameters():
    if "lora_B" in name:
        torch.nn.init.normal_(parameter, 0, 0.05)
given.save_pretrained("given")
source = random.Random(2)
part = lambda: [source.randrange(97, 123) for _ in range(source.randrange(3, 20))]
pairs = [(part(), part() + [257], part() + [257]) for _ in range(7)]
documents = [(prompt, answer) for prompt, *answers in pairs for answer in answers]
ends = torch.tensor([len(prompt) + len(answer) for prompt, answer in documents]).cumsum(0)
save_file(dict(tokens=torch.tensor([token for prompt, answer in documents for token in [*(-1 - each for each in prompt), *answer]], dtype=torch.int32), ends=ends),
          "pairs.tokens", metadata=dict(format="tessera tokens", vocabulary="258", pairs="1"))
def log_probabilities(model, prompt, answer):
    tokens = torch.tensor([prompt + answer])
    logs = model(tokens).logits[0, :-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return logs, logs[len(prompt) - 1:]
def orpo(model, reference):
    chosen, texts = [], []
    for prompt, *answers in pairs:
        (text, one), (_, other) = (log_probabilities(model, prompt, answer) for answer in answers)
        texts.append(text)
        odds = [mean - torch.log(-torch.expm1(mean)) for mean in (one.mean(), other.mean())]
        chosen.append((0.1 * one.mean(), 0.1 * other.mean(), -0.1 * F.logsigmoid(odds[0] - odds[1])))
    return chosen, -torch.cat(texts).mean()
def dpo(model, reference):
    rewards = [[0.1 * (log_probabilities(model, prompt, answer)[1].sum() - before) for answer, before in zip(answers, befores)]
               for (prompt, *answers), befores in zip(pairs, reference)]
    return [(one, other, -F.logsigmoid(one - other)) for one, other in rewards], 0
def texts(model, reference):
    return [[torch.zeros(())] * 3], -torch.cat([log_probabilities(model, document[:1], document[1:])[0] for document in learned]).mean()
learned = [[*json.loads(line)["text"].encode(), 257] for line in open("few.jsonl")]
def curve(method, make):
    model = peft.PeftModel.from_pretrained(base(), "given", is_trainable=True)
    with torch.no_grad():
        reference = [[log_probabilities(model, prompt, answer)[1].sum() for answer in answers] for prompt, *answers in pairs]
    optimizer = make(model)
    rows = []
    for step in range(4):
        for group in optimizer.param_groups:
            group["lr"] = group.setdefault("first", group["lr"]) * 0.5 * (1 + math.cos(step / 4 * math.pi))
        all, more = method(model, reference)
        loss = sum(each[2] for each in all) / len(all) + more
        one, other = (torch.stack([each[i] for each in all]).detach() for i in (0, 1))
        rows.append([loss.item(), one.mean().item(), other.mean().item(), (one > other).float().mean().item(), (one - other).mean().item()])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return rows
plain = lambda model: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01, betas=(0.9, 0.95), weight_decay=0)
plus = lambda model: create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=4, betas=(0.9, 0.95))
print(json.dumps(dict(dpo=curve(dpo, plain), orpo=curve(orpo, plain), texts=curve(texts, plus))))
"""


class Llama(Recipe):
    def setUp(self):
        super().setUp()
        write_model(self.folder / "model")
        (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="false"))
        text = "a b c d e f g h i j k l m n o p q r s t u v w x y z"
        source = random.Random(3)
        for part in range(2):
            lines = []
            for _ in range(80):
                begin = source.randrange(20)
                lines.append(json.dumps(dict(text=text[2 * begin:][: 2 * source.randrange(4, 30)])) + "\n")
            (self.folder / f"texts-{part}.jsonl").write_text("".join(lines))

    def run_program(self, *command, status=0):
        return super().run_program(*command, status=status, cwd=self.folder, env={**os.environ, "OMP_NUM_THREADS": "1"})

    def losses(self, said):
        return [float(loss) for loss in re.findall(r"epoch \d+: loss ([\d.]+)", said)]

    def generate(self, model, count=12):
        """Returns the text after "a b c", and what the command says."""
        (self.folder / "prompt").write_text("a b c d e f g h\n")
        said = self.run_program(TESSERA, "llm", "generate", model, "--prompts", "prompt", "--out", "continued.jsonl", "--max-new-tokens", count)
        return " d e f g h" + json.loads((self.folder / "continued.jsonl").read_text())["text"], said

    def tokenize(self):
        return self.run_program(TESSERA, "data", "tokenize", "texts-0.jsonl", "texts-1.jsonl", "--tokenizer", "model", "--out", "texts.tokens")

    def train(self, *arguments, ranks=2, lr=0.01, status=0):
        usual = [part for flag, value in (("--batch-size", 2), ("--data", "texts.tokens")) if flag not in arguments for part in (flag, value)]
        return self.run_program(TESSERA, "launch", "--config-file", "config.yaml", "-n", ranks, LLAMA, *usual, "--length", 64, "--lr", lr, *arguments, status=status)


class Training(Llama):
    def test_from_text_to_a_model_that_others_read(self):
        self.assertIn("160 documents", self.tokenize())
        first = self.train("--config", "model", "--num-epochs", 12, "--max-steps", 40, "--ckpt-prefix", "run", "--eval-data", "texts.tokens")
        losses = self.losses(first)
        self.assertLess(losses[-1], losses[0], first)
        (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="true"))
        again = self.train("--config", "model", "--num-epochs", 40, "--max-steps", 240, "--ckpt-prefix", "run", "--resume", "--eval-data", "texts.tokens",
                           "--units", "head-with-norm", "--output", "out", "--gguf", "out.gguf", "--gguf-code", "F32", ranks=3)
        self.assertLess(self.losses(again)[-1], 0.8, again)
        text = self.generate("out")[0]
        read = self.run_program(PYTHON, "-c", READ, "out", "out.gguf").splitlines()[-1]
        self.assertEqual(read.partition("a b c")[2], text)
        self.assertIn("i j k", text)
        # From the result, and from the GGUF file, the loss begins where it was.
        for model in ("out", "out.gguf"):
            further = self.train("--model", model, "--max-steps", 1, "--eval-data", "texts.tokens", "--packing", "whole", "--units", "apart", lr=0)
            self.assertLess(self.losses(further)[0], 0.8, further)

    def test_the_parameters_decay_that_hugging_faces_trainer_lets_decay(self):
        self.tokenize()
        (self.folder / "model/config.json").write_text(json.dumps({**MODEL, "model_type": "qwen2"}))  # which has biases
        self.train("--config", "model", "--max-steps", 2, "--output", "base")
        for decay in (0, 5):
            self.train("--model", "base", "--max-steps", 1, "--weight-decay", decay, "--output", f"decay-{decay}")
        said = self.run_program(PYTHON, "-c", DECAYED, "decay-0", "decay-5")
        self.assertIn("11 parameters do not decay", said)  # six biases, and five norms

    def test_accumulated_passes_count_by_their_tokens(self):
        self.tokenize()
        for clip in (0, 1):
            norms, curves = {}, {}
            for passes, rows in ((1, 4), (2, 2)):
                (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="false").replace("steps: 2", f"steps: {passes}"))
                self.train("--config", "model", "--packing", "whole", "--batch-size", rows, "--max-steps", 3, "--log-steps", 1, "--metrics", f"{clip}-{passes}.jsonl", "--clip", clip)
                rows = map(json.loads, (self.folder / f"{clip}-{passes}.jsonl").read_text().splitlines())
                rows = [row for row in rows if "grad_norm" in row]
                norms[passes] = [row["grad_norm"] for row in rows]
                curves[passes] = losses(rows)
            self.assertEqual(len(norms[1]), 3)
            for whole, accumulated in zip(norms[1], norms[2], strict=True):
                self.assertAlmostEqual(whole, accumulated, delta=2e-3 * whole)
            for whole, accumulated in zip(curves[1], curves[2], strict=True):
                self.assertAlmostEqual(whole, accumulated, delta=2e-4)

    def test_experts_are_balanced_with_the_same_weight_in_accumulated_passes(self):
        # All rows have the same tokens, of which not as many are learned: so the loss that balances experts is the same in each pass.
        text = "a b c d e f g h i j k l m n o p q"
        (self.folder / "texts-0.jsonl").write_text("".join(json.dumps(dict(prompt=text[:5 * row], completion=text[5 * row:])) + "\n" for row in range(1, 7)))
        (self.folder / "texts-1.jsonl").write_text((json.dumps(dict(prompt="a b c", chosen=" d e f", rejected=" f e d")) + "\n") * 4)
        for part, name in enumerate(("texts", "pairs")):
            self.run_program(TESSERA, "data", "tokenize", f"texts-{part}.jsonl", "--tokenizer", "model", "--out", f"{name}.tokens")
        experts = dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2, router_aux_loss_coef=10)

        def train(name, passes, rows, balance, *arguments):
            (self.folder / "model/config.json").write_text(json.dumps({**MODEL, **experts, "output_router_logits": balance}))
            (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="false").replace("steps: 2", f"steps: {passes}"))
            metrics = self.folder / f"{name}-{passes}-{balance}.jsonl"
            self.train("--config", "model", "--data", f"{name}.tokens", "--batch-size", rows, "--num-epochs", 3, "--log-steps", 1, "--metrics", metrics,
                       "--eval-data", f"{name}.tokens", *arguments)
            rows = list(map(json.loads, metrics.read_text().splitlines()))
            return [row[key] for key in ("loss", "grad_norm", "eval_loss") for row in rows if key in row]

        for name, rows, arguments in (("texts", 3, ["--packing", "whole"]), ("pairs", 2, ["--preference", "dpo"])):
            plain, one = (train(name, 1, rows, balance, *arguments) for balance in (False, True))
            several = train(name, rows, 1, True, *arguments)
            self.assertGreater(one[0] - plain[0], 10, name)  # at least the coefficient, if all experts are used equally
            self.assertLess(one[-1], plain[-1] + 5, name)  # evaluations measure texts alone
            for whole, accumulated in zip(one, several, strict=True):
                self.assertAlmostEqual(whole, accumulated, delta=1e-3 * max(1, whole))

    def test_losses_are_the_curve_of_transformers(self):
        letters = "the quick brown fox jumps over the lazy dog and other stories of old"
        (self.folder / "texts-0.jsonl").write_text("".join(json.dumps(dict(text=(letters[3 * row:] + letters)[: 36 + 3 * row])) + "\n" for row in range(8)))
        self.run_program(TESSERA, "data", "tokenize", "texts-0.jsonl", "--tokenizer", "model", "--out", "texts.tokens")
        self.train("--config", "model", "--max-steps", 1, "--output", "base", lr=0)
        theirs = json.loads(self.run_program(PYTHON, "-c", CURVE, "base", "texts-0.jsonl").splitlines()[-1])
        self.train("--model", "base", "--packing", "whole", "--num-epochs", 5, "--warmup", 0, "--weight-decay", 0, "--clip", 0, "--log-steps", 1, "--metrics", "ours.jsonl", lr=0.003)
        ours = losses(map(json.loads, (self.folder / "ours.jsonl").read_text().splitlines()))
        self.assertEqual(len(ours), 5)
        self.assertLess(ours[-1], ours[0] - 0.1)
        for own, other in zip(ours, theirs, strict=True):
            self.assertAlmostEqual(own, other, delta=5e-4)

    def test_errors_come_before_training(self):
        self.tokenize()
        self.assertIn("give either --model PATH, or --config FOLDER for a new model", self.run_program(LLAMA, "--data", "texts.tokens", status=2))
        for arguments, why in (
            (("--config", "model", "--length", 512), "--length 512: the model in model takes at most 256 tokens"),
            (("--config", "nothing"), "nothing: there is no such folder or GGUF file"),
            (("--config", "model", "--output", "texts.tokens"), "texts.tokens"),
            (("--model", "model", "--output", "model"), "--output model is the model that is trained on"),
            (("--config", "model", "--output", "out", "--gguf", "out/model.safetensors"), "the name of a GGUF file must end in .gguf"),
            (("--config", "model", "--length", 64, "--eval-data", "texts-0.jsonl"), "texts-0.jsonl is not a safetensors file"),
        ):
            self.assertIn(why, self.run_program(LLAMA, "--data", "texts.tokens", "--num-epochs", 1, *arguments, status=1))
        config = json.loads((self.folder / "model/config.json").read_text())
        (self.folder / "model/config.json").write_text(json.dumps({**config, "vocab_size": 100, "eos_token_id": 5, "bos_token_id": 6}))
        self.assertIn("has tokens of a vocabulary of 258, but the model knows only 100", self.run_program(LLAMA, "--data", "texts.tokens", "--config", "model", "--length", 64, status=1))
        (self.folder / "texts.jsonl").write_text('{"text": "a"}\n{"text"\n')
        self.assertIn("texts.jsonl:2: it is not JSON from byte 8 on",
                      self.run_program(TESSERA, "data", "tokenize", "texts.jsonl", "--tokenizer", "model", "--out", "other.tokens", status=1))


class Adapters(Llama):
    def test_each_method_trains_goes_on_and_is_read_by_peft(self):
        self.tokenize()
        self.train("--config", "model", "--num-epochs", 12, "--max-steps", 30, "--output", "base", "--eval-data", "texts.tokens")
        for method in ("lora", "dora", "qlora"):
            common = ["--model", "base", "--method", method, "--rank", 4, "--alpha", 8, "--eval-data", "texts.tokens", "--ckpt-prefix", f"run-{method}", "--adapter", f"ad-{method}"]
            first = self.losses(self.train(*common, "--num-epochs", 1))
            again = self.losses(self.train(*common, "--num-epochs", 2, "--resume", "--output", f"out-{method}", ranks=3))
            self.assertLess(again[-1], first[-1], method)
            difference, change = map(float, self.run_program(PYTHON, "-c", READ_ADAPTER, "base", f"ad-{method}", f"out-{method}").splitlines()[-1].split())
            self.assertLess(difference, 1e-4, method)
            self.assertGreater(change, 0.1, method)
            # What is saved of the base is a reference.
            saved = sum(file.stat().st_size for file in self.folder.glob(f"run-{method}-step-*/rank-*"))
            self.assertLess(saved, 2 * (self.folder / "base/model.safetensors").stat().st_size, method)
        said = self.run_program(TESSERA, "ckpt", "merge-adapter", "base", "ad-lora", "again")
        self.assertIn("again/model.safetensors", said)
        self.assertEqual((self.folder / "again/model.safetensors").read_bytes(), (self.folder / "out-lora/model.safetensors").read_bytes())
        refused = self.train("--model", "base", "--method", "qlora", "--quantisation", "int8", "--rank", 4, "--alpha", 8, "--num-epochs", 3, "--ckpt-prefix", "run-qlora", "--resume", status=1)
        self.assertIn("with weights held as nf4, but here they are held as int8", refused)
        refused = self.train("--model", "base", "--num-epochs", 3, "--ckpt-prefix", "run-dora", "--resume", status=1)
        self.assertIn("these adapters: default (rank 4, alpha 8, DoRA); and the model here: none", refused)
        self.assertIn("no layer is named 'query'", self.train("--model", "base", "--method", "lora", "--target-modules", "query", status=1))
        for arguments, why in (
            (("--model", "base", "--adapter", "x"), "neither --method nor the configuration makes adapters"),
            (("--config", "model", "--method", "lora"), "give --model PATH"),
            (("--model", "base", "--method", "lora", "--adapter", "out-lora"), "out-lora has a model"),
            (("--model", "base", "--method", "lora", "--adapter", "x", "--output", "ad-lora"), "ad-lora has an adapter"),
        ):
            self.assertIn(why, self.run_program(LLAMA, "--data", "texts.tokens", *arguments, status=1))
        wrong = self.run_program(TESSERA, "ckpt", "merge-adapter", "model", "ad-lora", "wrong", status=1)
        self.assertFalse((self.folder / "wrong").exists(), wrong)
        # A run that has ended writes its adapters again.
        common[-1] = "ad-again"
        self.assertIn("wrote the adapters to ad-again", self.train(*common, "--num-epochs", 2, "--resume"))
        self.assertEqual(*((self.folder / name / "adapter_model.safetensors").read_bytes() for name in ("ad-qlora", "ad-again")))
        # By flags, or by the configuration alone.
        few = ["--model", "base", "--num-epochs", 1, "--max-steps", 2, "--optimizer", "adamw8bit", "--adapter"]
        self.train(*few, "by-flags", "--method", "qlora", "--rank", 4, "--alpha", 8)
        (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="false") + "tessera_config: {quantisation: nf4, lora_r: 4, lora_alpha: 8}\n")
        self.train(*few, "by-config")
        self.assertEqual(*((self.folder / name / "adapter_model.safetensors").read_bytes() for name in ("by-flags", "by-config")))
        # Flags win over it.
        self.train(*few, "others", "--method", "lora", "--rank", 2, "--target-modules", "q_proj, v_proj")
        config = json.loads((self.folder / "others/adapter_config.json").read_text())
        self.assertEqual((config["r"], config["lora_alpha"], config["target_modules"], config["task_type"]), (2, 8, ["q_proj", "v_proj"], "CAUSAL_LM"))
        self.train("--model", "base", "--method", "full", "--max-steps", 2, "--output", "whole")
        self.assertNotEqual(*((self.folder / name / "model.safetensors").read_bytes() for name in ("base", "whole")))


class Methods(Llama):
    NAMES = ["loss", "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins"]

    def base(self):
        self.tokenize()
        self.train("--config", "model", "--max-steps", 10, "--output", "base")

    def curve(self, ranks, rows, passes, *arguments):
        (self.folder / "config.yaml").write_text(CONFIG.format(checkpointing="false").replace("steps: 2", f"steps: {passes}"))
        (self.folder / "curve.jsonl").unlink(missing_ok=True)
        self.train("--model", "base", "--batch-size", rows, "--num-epochs", 4, "--warmup", 0, "--weight-decay", 0, "--clip", 0, "--log-steps", 1, "--metrics", "curve.jsonl",
                   *arguments, ranks=ranks)
        reported = map(json.loads, (self.folder / "curve.jsonl").read_text().splitlines())
        return [[row[name] for name in self.NAMES if name in row] for row in reported if "loss" in row]

    def expect_near(self, ours, theirs):
        self.assertEqual(len(ours), len(theirs))
        for own, other in zip(ours, theirs):
            for one, two in zip(own, other):
                self.assertAlmostEqual(one, two, delta=1e-4, msg=f"{ours}\n{theirs}")

    def test_preference_and_lora_plus_are_those_of_python(self):
        self.base()
        (self.folder / "few.jsonl").write_text("".join((self.folder / "texts-0.jsonl").read_text().splitlines(keepends=True)[:7]))
        self.run_program(TESSERA, "data", "tokenize", "few.jsonl", "--tokenizer", "model", "--out", "few.tokens")
        theirs = json.loads(self.run_program(PYTHON, "-c", METHODS).splitlines()[-1])
        given = ["--from-adapter", "given"]
        for method, ranks, rows, passes in (("dpo", 1, 7, 1), ("dpo", 2, 2, 2), ("orpo", 3, 3, 1)):  # the last rank has a pair less
            self.expect_near(self.curve(ranks, rows, passes, "--data", "pairs.tokens", *given, "--preference", method), theirs[method])
        ours = self.curve(2, 2, 2, "--data", "few.tokens", *given, "--packing", "whole", "--lora-plus-ratio", 4)
        self.expect_near(ours, theirs["texts"])
        # Without adapters, the reference is the same model, so all rewards are 0 at first.
        first = self.curve(2, 4, 1, "--data", "pairs.tokens", "--preference", "dpo", "--method", "full", "--eval-data", "pairs.tokens")[0]
        self.expect_near([first], [[math.log(2), 0, 0, first[3], 0]])
        for arguments, why in (
            (("--preference", "dpo"), "texts.tokens has texts, but --preference dpo learns from pairs"),
            (("--data", "pairs.tokens"), "pairs.tokens has pairs of a chosen and a rejected answer; give --preference dpo or orpo"),
            ((*given, "--rank", 4), "--rank is taken from the adapter in given; leave it out"),
            ((*given, "--method", "dora"), "the adapter in given was trained without DoRA"),
            ((*given, "--adapter", "given"), "--adapter given is the adapter from which training begins"),
            (("--lora-plus-ratio", 4), "--lora-plus-ratio is for adapters"),
            (("--data", "pairs.tokens", "--preference", "orpo", "--packing", "cut"), "--packing is for texts"),
        ):
            self.assertIn(why, self.train("--model", "base", *arguments, status=2 if "--rank" in arguments or "--packing" in arguments else 1))

    def test_the_best_is_kept_also_by_a_run_that_resumes(self):
        self.base()
        # Letters in another order: what they are helps at first, and then their order does harm.
        source = random.Random(4)
        letters = [" ".join(source.sample("abcdefghijklmnopqrstuvwxyz", 26)) for _ in range(8)]
        (self.folder / "others.jsonl").write_text("".join(json.dumps(dict(text=text)) + "\n" for text in letters))
        self.run_program(TESSERA, "data", "tokenize", "others.jsonl", "--tokenizer", "model", "--out", "others.tokens")
        common = ["--model", "base", "--method", "lora", "--num-epochs", 20, "--eval-data", "others.tokens", "--eval-steps", 4, "--warmup", 0, "--neftune-alpha", 1]
        def run(name, *more, patience=3):
            said = self.train(*common, "--keep-best", "--patience", patience, "--ckpt-prefix", name, "--adapter", f"ad-{name}", "--metrics", f"{name}.jsonl", *more, lr=0.1)
            rows = map(json.loads, (self.folder / f"{name}.jsonl").read_text().splitlines())
            return said, [row["eval_loss"] for row in rows if "eval_loss" in row]
        said, whole = run("whole", "--output", "out")
        best = whole.index(min(whole))
        self.assertEqual(len(whole), best + 4, whole)  # three more, and none of them better
        self.assertEqual(len(list(self.folder.glob("whole-step-*"))), 2, said)
        self.assertIn("the run has ended early, after 3 evaluations", said)
        run("parts", patience=1)
        again, parts = run("parts", "--resume")
        self.assertEqual(parts, whole, again)
        self.assertEqual(*((self.folder / name / "adapter_model.safetensors").read_bytes() for name in ("ad-whole", "ad-parts")))
        measured = self.losses(self.train("--model", "out", "--max-steps", 1, "--eval-data", "others.tokens", lr=0))
        self.assertAlmostEqual(measured[0], min(whole), delta=2e-4)
        self.assertIn("the run has ended early, after 3 evaluations", run("whole", "--resume")[0])


class Devices(Llama):
    """On XLA devices, of which one process has all."""

    def programs(self, said):
        self.assertNotIn("runs on the CPU", said)
        return sum(map(int, re.search(r"programs +(\d+) compiled, (\d+) loaded", said).groups()))

    def test_replicas_train_as_ranks(self):
        self.tokenize()
        flags = ["--config", "model", "--max-steps", 3, "--eval-data", "texts.tokens", "--output"]
        on_ranks = self.train(*flags, "on-ranks", lr=0.001)
        os.environ["TESSERA_DEVICE"] = "xla"
        self.addCleanup(os.environ.pop, "TESSERA_DEVICE", None)
        on_replicas = self.train(*flags, "on-replicas", "--metrics-debug", lr=0.001)
        self.assertAlmostEqual(self.losses(on_replicas)[0], self.losses(on_ranks)[0], delta=2e-4)
        self.assertLessEqual(self.programs(on_replicas), 11, on_replicas)
        # A token that goes on with the text is the same program each time.
        os.environ["TESSERA_XLA_METRICS"] = "1"
        self.addCleanup(os.environ.pop, "TESSERA_XLA_METRICS", None)
        shorter_and_longer = [self.generate("on-replicas", count) for count in (4, 8)]
        del os.environ["TESSERA_DEVICE"]
        self.assertEqual(shorter_and_longer[1][0], self.generate("on-replicas", 8)[0])
        self.assertEqual(*(self.programs(said) for _, said in shorter_and_longer))
        self.assertNotIn("warning", shorter_and_longer[1][1])

    def test_a_step_is_compiled_for_devices_that_are_not_here(self):
        self.tokenize()
        said = self.run_program(LLAMA, "--config", "model", "--data", "texts.tokens", "--length", 64, "--batch-size", 2, "--compile-for", "cpu:2")
        self.assertRegex(said, r"replicas +2\nmemory .*\n(.*\n)*all-gather +[0-9]+, ")
        self.assertIn("--compile-for runs in one process", self.train("--config", "model", "--compile-for", "cpu:2", status=1))


LLAMA_CPP = """
import sys, numpy, torch
from llama_cpp import Llama
from transformers import AutoModelForCausalLM
GGML_TYPE_F32 = 0
engine = Llama(sys.argv[2], lora_path=(sys.argv + [None])[3], n_ctx=64, logits_all=True, type_k=GGML_TYPE_F32, type_v=GGML_TYPE_F32, verbose=False)
tokens = engine.tokenize(b"a b c d e f g h", add_bos=False)
engine.eval(tokens)
with torch.no_grad():
    expected = AutoModelForCausalLM.from_pretrained(sys.argv[1])(torch.tensor([tokens])).logits[0].numpy()
print("apart by", numpy.abs(engine.scores[: len(tokens)] - expected).max())
engine.reset()
print(engine("a b c d e f g h", max_tokens=12, temperature=0, echo=True)["choices"][0]["text"])
"""


class LlamaCpp(Llama):
    """Under --long: what is exported runs there."""

    def there(self, *files):
        """By how much scores differ from those of a folder, and the text."""
        apart, text = self.run_program(PYTHON, "-c", LLAMA_CPP, *files).splitlines()[-2:]
        return float(apart.rpartition(" ")[2]), text.partition("a b c")[2]

    def test_the_result_is_the_same_model_there(self):
        self.tokenize()
        self.train("--config", "model", "--num-epochs", 8, "--output", "out", "--gguf", "out.gguf", "--gguf-code", "F32")
        apart, text = self.there("out", "out.gguf")
        self.assertLess(apart, 1e-3)
        self.assertEqual(text, self.generate("out")[0])

    def test_an_adapter_beside_the_model_is_the_merged_model_there(self):
        self.tokenize()
        self.train("--config", "model", "--num-epochs", 4, "--output", "base", "--gguf", "base.gguf", "--gguf-code", "F32")
        self.train("--model", "base", "--method", "lora", "--rank", 4, "--alpha", 8, "--num-epochs", 4, "--adapter", "adapter", "--output", "out")
        self.run_program(TESSERA, "ckpt", "convert", "adapter", "adapter.gguf", "--to", "gguf", "--base", "base")
        apart, text = self.there("out", "base.gguf", "adapter.gguf")
        self.assertLess(apart, 1e-3)
        self.assertEqual(text, self.generate("out")[0])
        self.assertGreater(self.there("out", "base.gguf")[0], 0.1)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
