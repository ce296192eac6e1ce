"""Runs the recipe for pairs of sentences as a person would, and looks at what it learns, saves and leaves behind."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import time
import unittest

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
# As Accelerate's guide to FSDP shows it.
ACCELERATE = """compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""
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


class Runs(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        (self.folder / "config.yaml").write_text(CONFIG)
        (self.folder / "data").mkdir()

    def command(self, *flags, launch=(), data=("--fake-data",)):
        return [LAUNCHER, "launch", *(launch or ["--config-file", self.folder / "config.yaml"]), GLUE, *data, *flags]

    def run_recipe(self, *flags, status=0, **more):
        done = subprocess.run([str(word) for word in self.command(*flags, **more)], capture_output=True, text=True)
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return done.stdout + done.stderr

    def metrics(self, name, *flags, **more):
        file = self.folder / f"{name}.jsonl"
        said = self.run_recipe("--metrics", file, "--log-steps", 1, *flags, **more)
        return said, [json.loads(line) for line in file.read_text().splitlines()]

    def transformers(self, program, *arguments):
        done = subprocess.run([PYTHON, "-c", program, *map(str, arguments)], capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout


class Training(Runs):
    def test_learns_and_goes_on_and_transformers_reads_it(self):
        flags = ["--num-epochs", 3]
        said, through = self.metrics("through", *flags, "--target-accuracy", 90, "--output", self.folder / "output")
        self.assertRegex(said, r"accuracy (9[5-9]|100)\.\d+ %, F1 (9[5-9]|100)\.\d+ % after 375 steps")
        losses = [row["loss"] for row in through if "loss" in row]
        self.assertEqual(len(losses), 375)
        self.assertLess(sum(losses[-20:]), sum(losses[:20]) / 3)
        self.assertLess(through[0]["lr"], through[36]["lr"])
        self.assertLess(through[374]["lr"], 1e-5)

        # What transformers makes of the folder, and what becomes of the folder here.
        if subprocess.run([PYTHON, "-c", "import transformers"], capture_output=True).returncode == 0:
            self.assertEqual(self.transformers(READ, self.folder / "output").splitlines()[-1], "[1, 0]")
        said = self.run_recipe("--model", self.folder / "output", "--num-epochs", 0, "--max-length", 64, "--target-accuracy", 90)
        self.assertIn("after 0 steps", said)

    def test_goes_on_where_it_was(self):
        prefix, flags = ["--ckpt-prefix", self.folder / "state"], ["--num-epochs", 2, "--batch-size", 50]
        _, through = self.metrics("through", *flags, "--output", self.folder / "output")
        first = self.folder / "state-step-000040"
        with subprocess.Popen(list(map(str, self.command(*flags, *prefix))), stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as killed:
            while not first.exists() and killed.poll() is None:
                time.sleep(0.01)
            killed.kill()
        self.assertIn("resume from it", self.run_recipe(*prefix, *flags, status=1))
        self.assertIn("samples would come in another order", self.run_recipe(*prefix, "--resume", "--num-epochs", 2, "--seed", 25, status=1))
        said, after = self.metrics("after", *prefix, "--resume", *flags)
        self.assertIn("after 80 steps", said)
        self.assertEqual(after, through[40:])
        shutil.rmtree(self.folder / "state-step-000080")
        one_rank = ["--config-file", self.folder / "config.yaml", "-n", 1]
        said = self.run_recipe(*prefix, "--resume", *flags, launch=one_rank)
        self.assertIn("40 steps with batches of 100 on all ranks together count as 80 with batches of 50", said)
        self.assertIn("after 160 steps", said)

        converted = subprocess.run([LAUNCHER, "ckpt", "convert", first, self.folder / "model.safetensors", "--to", "safetensors", "--weights-only"], capture_output=True, text=True)
        self.assertEqual(converted.returncode, 0, converted.stderr)
        shutil.move(self.folder / "model.safetensors", self.folder / "output/model.safetensors")
        if subprocess.run([PYTHON, "-c", "import transformers"], capture_output=True).returncode == 0:
            self.transformers(READ, self.folder / "output")


class Settings(Runs):
    def test_sharded_is_replicated(self):
        flags = ["--num-epochs", 1, "--batch-size", 50]
        one = ["--nproc-per-node", "2"]
        _, sharded = self.metrics("sharded", *flags, launch=one)
        os.environ["ACCELERATE_USE_FSDP"] = "false"
        self.addCleanup(os.environ.pop, "ACCELERATE_USE_FSDP")
        _, whole = self.metrics("whole", *flags, launch=one)
        for a, b in zip(sharded, whole, strict=True):
            if "loss" in a:
                self.assertAlmostEqual(a["loss"], b["loss"], delta=1e-4)

    def test_takes_files_of_others_as_they_stand(self):
        flags = ["--num-epochs", 1, "--batch-size", 100]
        _, own = self.metrics("own", *flags)
        (self.folder / "config.yaml").write_text(ACCELERATE)
        _, accelerate = self.metrics("accelerate", *flags)
        self.assertEqual(accelerate, own)
        (self.folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}))
        _, deepspeed = self.metrics("deepspeed", *flags, launch=["-n", 2, "--config-file", self.folder / "ds.json"])
        for a, b in zip(deepspeed, own, strict=True):
            if "loss" in a:
                self.assertAlmostEqual(a["loss"], b["loss"], delta=0.02)

    def test_computed_activations_give_the_losses_of_kept_ones(self):
        flags = ["--num-epochs", 1, "--batch-size", 100]
        _, kept = self.metrics("kept", *flags)
        (self.folder / "config.yaml").write_text(CONFIG.replace("fsdp_config:", "fsdp_config:\n  fsdp_activation_checkpointing: true"))
        _, computed = self.metrics("computed", *flags)
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


class Devices(Runs):
    """XLA devices. A process stands for all of them."""

    def test_replicas_train_as_ranks_do_and_go_on_from_their_state(self):
        flags = ["--batch-size", 50, "--ckpt-prefix", self.folder / "state"]
        _, on_ranks = self.metrics("ranks", "--num-epochs", 1, *flags, launch=["--nproc-per-node", 2])
        self.assertTrue((self.folder / "state-step-000040").exists())
        said, on_replicas = self.metrics("replicas", "--num-epochs", 2, "--resume", "--device", "xla", "--num-cores", 2, *flags, launch=["--nproc-per-node", 1])
        self.assertIn("after 80 steps", said)
        first, then = ([row["loss"] for row in rows if "loss" in row] for rows in (on_ranks, on_replicas))
        self.assertLess(sum(then) / len(then), sum(first[-10:]) / 10)
        self.assertNotIn("runs on the CPU", said)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[4:]])
