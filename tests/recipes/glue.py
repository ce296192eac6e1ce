"""Runs the recipe for pairs of sentences as a person would, and looks at what it learns, saves and leaves behind."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import unittest

from recipe import Recipe, losses

LAUNCHER, GLUE, PYTHON = sys.argv[1:4]
CONFIG = """distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_cpu_ram_efficient_loading: true
  fsdp_sync_module_states: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 1
num_processes: 2
"""
ACCELERATE = pathlib.Path(__file__).with_name("accelerate.yaml").read_text()  # as Accelerate's guide to FSDP shows it
HEADER = "Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n"
READ = """
import sys, torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer
folder = sys.argv[1]
model, info = AutoModelForSequenceClassification.from_pretrained(folder, output_loading_info=True)
assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
texts = ["Again sails fog tide waves anchor"] * 2, ["Today: fog sails harbour tide waves", "Today: flour oven sugar dough crust"]
print(model.eval()(**AutoTokenizer.from_pretrained(folder, use_fast=False)(*texts, return_tensors="pt")).logits.argmax(1).tolist())
"""


class Glue(Recipe):
    def setUp(self):
        super().setUp()
        (self.folder / "config.yaml").write_text(CONFIG)
        (self.folder / "data").mkdir()

    def command(self, *flags, launch=(), data=("--fake-data",)):
        return [LAUNCHER, "launch", *(launch or ["--config-file", self.folder / "config.yaml"]), GLUE, *data, *flags]

    def transformers(self, folder):
        return self.run_program(PYTHON, "-c", READ, folder, env={**os.environ, "HF_HUB_OFFLINE": "1"})


class Training(Glue):
    def test_learns_and_goes_on_and_transformers_reads_it(self):
        flags = ["--num-epochs", 3]
        through = self.metrics(*flags, "--target-accuracy", 90, "--output", self.folder / "output", name="through")
        self.assertRegex(self.said, r"accuracy (9[5-9]|100)\.\d+ %, F1 (9[5-9]|100)\.\d+ % after 375 steps")
        ours = losses(through)
        self.assertEqual(len(ours), 375)
        self.assertLess(sum(ours[-20:]), sum(ours[:20]) / 3)
        self.assertLess(through[0]["lr"], through[36]["lr"])
        self.assertLess(through[374]["lr"], 1e-5)

        # What transformers makes of the folder, and what becomes of the folder here.
        if subprocess.run([PYTHON, "-c", "import transformers"], capture_output=True).returncode == 0:
            self.assertEqual(self.transformers(self.folder / "output").splitlines()[-1], "[1, 0]")
        said = self.run_recipe("--model", self.folder / "output", "--num-epochs", 0, "--max-length", 64, "--target-accuracy", 90)
        self.assertIn("after 0 steps", said)

    def test_goes_on_where_it_was(self):
        prefix, flags = ["--ckpt-prefix", self.folder / "state"], ["--num-epochs", 2, "--batch-size", 50]
        through = self.metrics(*flags, "--output", self.folder / "output", name="through")
        first = self.folder / "state-step-000040"
        with subprocess.Popen(list(map(str, self.command(*flags, *prefix))), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as killed:
            while not first.exists() and killed.poll() is None:
                time.sleep(0.01)
            killed.kill()
        self.assertIn("resume from it", self.run_recipe(*prefix, *flags, status=1))
        self.assertIn("samples would come in another order", self.run_recipe(*prefix, "--resume", "--num-epochs", 2, "--seed", 25, status=1))
        after = self.metrics(*prefix, "--resume", *flags, name="after")
        self.assertIn("after 80 steps", self.said)
        self.assertEqual(after, through[40:])
        shutil.rmtree(self.folder / "state-step-000080")
        one_rank = ["--config-file", self.folder / "config.yaml", "-n", 1]
        said = self.run_recipe(*prefix, "--resume", *flags, launch=one_rank)
        self.assertIn("40 steps with batches of 100 on all ranks together count as 80 with batches of 50", said)
        self.assertIn("after 160 steps", said)

        self.run_program(LAUNCHER, "ckpt", "convert", first, self.folder / "model.safetensors", "--to", "safetensors", "--weights-only")
        shutil.move(self.folder / "model.safetensors", self.folder / "output/model.safetensors")
        if subprocess.run([PYTHON, "-c", "import transformers"], capture_output=True).returncode == 0:
            self.transformers(self.folder / "output")


class Settings(Glue):
    def test_sharded_is_replicated(self):
        flags = ["--num-epochs", 1, "--batch-size", 50]
        one = ["--nproc-per-node", "2"]
        sharded = self.metrics(*flags, launch=one, name="sharded")
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        self.addCleanup(os.environ.pop, "ACCELERATE_USE_FSDP")
        whole = self.metrics(*flags, launch=one, name="whole")
        for a, b in zip(sharded, whole, strict=True):
            if "loss" in a:
                self.assertAlmostEqual(a["loss"], b["loss"], delta=1e-4)

    def test_takes_files_of_others_as_they_stand(self):
        flags = ["--num-epochs", 1, "--batch-size", 100]
        own = self.metrics(*flags, name="own")
        (self.folder / "config.yaml").write_text(ACCELERATE)
        accelerate = self.metrics(*flags, name="accelerate")
        self.assertEqual(accelerate, own)
        (self.folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
        deepspeed = self.metrics(*flags, launch=["-n", 2, "--config-file", self.folder / "ds.json"], name="deepspeed")
        for a, b in zip(deepspeed, own, strict=True):
            if "loss" in a:
                self.assertAlmostEqual(a["loss"], b["loss"], delta=0.02)

    def test_computed_activations_give_the_losses_of_kept_ones(self):
        flags = ["--num-epochs", 1, "--batch-size", 100]
        kept = self.metrics(*flags, name="kept")
        (self.folder / "config.yaml").write_text(CONFIG.replace("fsdp_config:", "fsdp_config:\n  fsdp_activation_checkpointing: true"))
        computed = self.metrics(*flags, name="computed")
        self.assertEqual(computed, kept)

    def test_files_are_read(self):
        lines = ["1\t1\t2\tHe said \"no\" .\tHe said no .\n", "0\t3\t4\tCafé olé\t東京\n"] * 8
        for name in ("train", "dev"):
            (self.folder / f"data/{name}.tsv").write_text(HEADER + "".join(lines))
        data = ["--data", self.folder / "data"]
        self.assertIn("after 1 steps", self.run_recipe("--num-epochs", 1, data=data))
        (self.folder / "data/dev.tsv").write_text(HEADER + lines[0] + "1\tbroken\n")
        said = self.run_recipe(data=data, status=1)
        self.assertIn("dev.tsv:3: 2 columns, but the header has 5", said)
        (self.folder / "data/train.tsv").unlink()
        self.assertIn("has no train.tsv", self.run_recipe(data=data, status=1))

    def test_wrong_flags_are_told(self):
        one = ["--nproc-per-node", "1"]
        self.assertIn("--fake-data", self.run_recipe(status=2, data=[], launch=one))
        self.assertIn("--ckpt-prefix", self.run_recipe("--resume", status=2, launch=one))
        self.assertIn("below the target", self.run_recipe("--num-epochs", 0, "--target-accuracy", 99, status=21, launch=one))
        self.assertIn("vocab.txt", self.run_recipe("--model", self.folder / "nowhere", status=1, launch=one))
        self.run_recipe("--num-epochs", 0, "--output", self.folder / "small", "--max-length", 32, launch=one)
        said = self.run_recipe("--model", self.folder / "small", status=1, launch=one)
        self.assertIn("--max-length 128: the model in", said)


class Devices(Glue):
    """XLA devices. A process stands for all of them."""

    def test_replicas_train_as_ranks_do_and_go_on_from_their_state(self):
        flags = ["--batch-size", 50, "--ckpt-prefix", self.folder / "state"]
        on_ranks = self.metrics("--num-epochs", 1, *flags, launch=["--nproc-per-node", 2], name="ranks")
        self.assertTrue((self.folder / "state-step-000040").exists())
        on_replicas = self.metrics("--num-epochs", 2, "--resume", "--device", "xla", "--num-cores", 2, *flags, launch=["--nproc-per-node", 1], name="replicas")
        self.assertIn("after 80 steps", self.said)
        first, then = losses(on_ranks), losses(on_replicas)
        self.assertLess(sum(then) / len(then), sum(first[-10:]) / 10)
        self.assertNotIn("runs on the CPU", self.said)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
