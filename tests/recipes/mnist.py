"""Runs the MNIST recipe as a person would, with generated images, and looks at what it says, saves and leaves behind."""
import gzip
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest

from recipe import Recipe, losses

LAUNCHER, MNIST = sys.argv[1], sys.argv[2]
FASHION = pathlib.Path("/usr/share/datasets/fashion-mnist")


def children(parent):
    return sorted(int(pid) for task in pathlib.Path(f"/proc/{parent}/task").iterdir() for pid in (task / "children").read_text().split())


def ranks_of(launcher):
    return [pid for pid in children(launcher) if "mnist" in pathlib.Path(f"/proc/{pid}/comm").read_text()]


def runs(pid):
    """Whether there is more of a process than its end, which somebody has yet to ask for."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(condition):
    deadline = time.monotonic() + 30
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError("waited 30 s in vain")
        time.sleep(0.02)


class Mnist(Recipe):
    def command(self, *flags, ranks=2, fake=True, hosts=False):
        data = ["--fake-data"] if fake else []
        here = ["sh", "-c", 'TESSERA_HOST_ID=host$((RANK / 2)) exec "$0" "$@"'] if hosts else []  # as if each host had two ranks
        return [LAUNCHER, "launch", "--nproc-per-node", str(ranks), *here, MNIST, *data, *map(str, flags)]


class Training(Mnist):
    def test_sharded_is_replicated(self):
        flags = ["--num-epochs", 1, "--batch-size", 50]
        *expected, accuracy = self.metrics("--run-without-fsdp", *flags)
        self.assertEqual(len(expected), 60)
        self.assertLess(expected[-1]["loss"], expected[0]["loss"] / 4)
        for sharding in ([], ["--use-nested-fsdp"], ["--use_nested_fsdp", "--flatten_parameters"]):
            *ours, own_accuracy = self.metrics(*sharding, *flags)
            for own, other in zip(ours, expected, strict=True):
                self.assertAlmostEqual(own["loss"], other["loss"], delta=1e-5)
                self.assertAlmostEqual(own["grad_norm"], other["grad_norm"], delta=1e-4)
            self.assertAlmostEqual(own_accuracy["accuracy"], accuracy["accuracy"], delta=0.1)

    def test_shared_parameters_give_the_losses_of_gathered_ones(self):
        flags = ["--num-epochs", 1, "--batch-size", 300, "--use-nested-fsdp"]
        for dtype in ("float32", "bfloat16"):
            shared, gathered = (self.metrics("--compute-dtype", dtype, *flags, env=dict(os.environ, TESSERA_RESIDENCE=residence))
                                for residence in ("node-shared", "gathered"))
            self.assertEqual(shared, gathered)

    def test_two_levels_give_the_losses_of_one(self):
        flags = ["--num-epochs", 1, "--batch-size", 300, "--use-nested-fsdp"]
        one, *two = (self.metrics(*flags, "--ckpt-prefix", self.folder / word, ranks=3, hosts=True, env=os.environ | {name: word})
                     for name, word in (("TESSERA_LEVELS", "1"), ("TESSERA_RESIDENCE", "gathered"), ("TESSERA_RESIDENCE", "node-shared")))
        for own in two:
            self.assertEqual(own, one)

    def test_checkpointed_activations_give_the_losses_of_kept_ones(self):
        flags = ["--num-epochs", 1, "--batch-size", 300]
        for more in ([], ["--use-nested-fsdp", "--compute-dtype", "bfloat16"], ["--run-without-fsdp"]):
            self.assertEqual(self.metrics("--use-gradient-checkpointing", *more, *flags), self.metrics(*more, *flags))

    def test_metrics_have_the_format_that_their_names_say(self):
        flags = ["--num-epochs", 1, "--batch-size", 400, "--metrics", f"mlflow:{self.folder}/runs", "--metrics", f"{self.folder}/board/"]
        *steps, last = self.metrics(*flags)
        lines = next((self.folder / "runs/0").glob("*/metrics/loss")).read_text().splitlines()
        self.assertEqual([float(line.split()[1]) for line in lines], losses(steps))
        self.assertEqual(len(list((self.folder / "board").glob("events.out.tfevents.*"))), 1)
        self.assertIn("FILE.jsonl", self.run_recipe("--metrics", "table.txt", status=2))
        self.assertIn("to_csv", self.run_recipe("--metrics", "table.csv", status=2))

    def test_lower_precision_learns(self):
        for dtype in ("bfloat16", "float16"):
            ours = losses(self.metrics("--compute-dtype", dtype, "--use-nested-fsdp", "--num-epochs", 1, "--batch-size", 50))
            self.assertLess(ours[-1], ours[0] / 4, dtype)

    def test_resumed_run_has_the_losses_of_one_that_went_through(self):
        flags = ["--batch-size", 100, "--use-nested-fsdp"]
        through = self.metrics("--num-epochs", 3, *flags, name="through")
        prefix = ["--ckpt-prefix", self.folder / "net"]
        self.run_recipe("--num-epochs", 1, "--metrics", self.folder / "parts.jsonl", "--log-steps", 1, *flags, *prefix)
        said = self.run_recipe("--resume", "--num-epochs", 2, *flags, *prefix, "--no-ckpt-consolidation")
        self.assertIn("net-step-000030", said)
        (self.folder / "net-step-000060/rank-1-of-2.safetensors").unlink()
        said = self.run_recipe("--resume", "--num-epochs", 2, *flags, *prefix, "--no-ckpt-consolidation")
        self.assertIn("skipping a checkpoint", said)
        self.assertIn("'rank-1-of-2.safetensors' is missing", said)
        self.assertIn("net-step-000030", said)
        self.assertTrue((self.folder / "net-step-000060.damaged").exists())
        shutil.rmtree(self.folder / "net-step-000060")
        parts = self.metrics("--resume", "--num-epochs", 3, *flags, *prefix, name="parts")
        self.assertEqual([row for row in parts if "loss" in row], [row for row in through if "loss" in row])
        self.assertEqual(parts[-1]["accuracy"], parts[-1]["consolidated_accuracy"])
        said = self.run_recipe("--resume", "--num-epochs", 3, "--seed", 1, *flags, *prefix, status=1)
        self.assertIn("seed 42", said)

    def test_run_goes_on_with_another_number_of_ranks(self):
        flags = ["--batch-size", 100, "--ckpt-prefix", self.folder / "net"]
        self.run_recipe("--num-epochs", 1, *flags)
        said = self.run_recipe("--resume", "--num-epochs", 2, *flags, ranks=3)
        self.assertIn("net-step-000030", said)
        self.assertIn("epoch 2/2: accuracy", said)

    def test_run_goes_on_without_a_rank_that_was_killed(self):
        command = self.command("--num-epochs", 4, "--batch-size", 100, "--ckpt-prefix", self.folder / "net")
        command[2:2] = ["--max-restarts", "1", "--min-ranks", "1"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
            wait_for(lambda: launcher.poll() is not None or list(self.folder.glob("net-step-*[0-9]")))
            os.kill(ranks_of(launcher.pid)[1], signal.SIGKILL)
            said = launcher.communicate(timeout=600)[0]
        self.assertEqual(launcher.returncode, 0, said)
        self.assertIn("launch: 1 rank on", said)
        self.assertIn("epoch 4/4: accuracy", said)

    def test_signal_saves_in_the_middle_of_an_epoch_and_the_run_goes_on(self):
        flags = ["--batch-size", 10, "--use-nested-fsdp", "--num-epochs", 2]
        of_steps = lambda rows: [(row["step"], row["loss"]) for row in rows if "loss" in row]  # the first norm after a start is rounded otherwise
        through = of_steps(self.metrics(*flags, name="through"))
        more = [*flags, "--ckpt-prefix", self.folder / "net", "--no-ckpt-consolidation"]
        for whom, number in ((lambda launcher, ranks: launcher, signal.SIGTERM), (lambda launcher, ranks: ranks[1], signal.SIGUSR1),
                             (lambda launcher, ranks: launcher, signal.SIGINT)):
            file = self.folder / "parts.jsonl"
            before = len(file.read_text().splitlines()) if file.exists() else 0
            command = self.command("--metrics", file, "--log-steps", 1, "--resume", *more)
            with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
                wait_for(lambda: file.exists() and len(file.read_text().splitlines()) > before + 20)
                os.kill(whom(launcher.pid, ranks_of(launcher.pid)), number)
                said = launcher.communicate(timeout=300)[0]
            self.assertIn("stopped by a signal; continue with --resume", said)
            if number == signal.SIGUSR1:
                self.assertEqual(launcher.returncode, 0, said)
        self.assertEqual(of_steps(self.metrics("--resume", *more, name="parts")), through)


class Trouble(Mnist):
    def test_target_decides_the_status(self):
        self.assertIn("below the target", self.run_recipe("--num-epochs", 0, "--target-accuracy", 99, status=21))
        self.run_recipe("--num-epochs", 1, "--target-accuracy", 87.5, ranks=1)

    def test_prefix_of_another_run_is_refused(self):
        flags = ["--num-epochs", 1, "--batch-size", 400, "--ckpt-prefix", self.folder / "net", "--metrics", self.folder / "net.jsonl"]
        self.run_recipe(*flags)
        self.assertIn("--resume", self.run_recipe(*flags, status=1))
        self.assertIn("the run has had its 1 epoch; for more, raise --num-epochs", self.run_recipe("--resume", *flags))
        rows = [json.loads(line) for line in (self.folder / "net.jsonl").read_text().splitlines()]
        self.assertEqual(rows[-1]["step"], 8)

    def test_what_could_not_be_saved_is_known_at_once(self):
        (self.folder / "file").write_text("")
        for prefix, words in (("file/net", "can't create"), ("", "add the beginning of the names")):
            said = self.run_recipe("--ckpt-prefix", f"{self.folder}/{prefix}", status=1, ranks=1)
            self.assertIn(words, said)
            self.assertNotIn("epoch", said)

    def test_wrong_data_is_named(self):
        said = self.run_recipe("--datadir", self.folder / "nowhere", status=1, fake=False)
        self.assertIn("nowhere", said)
        for file in FASHION.iterdir():
            shutil.copy(file, self.folder)
        whole = gzip.decompress((self.folder / "train-images-idx3-ubyte.gz").read_bytes())
        (self.folder / "train-images-idx3-ubyte.gz").unlink()
        (self.folder / "train-images-idx3-ubyte").write_bytes(whole[:-1000])
        said = self.run_recipe("--datadir", self.folder, status=1, fake=False)
        self.assertIn("train-images-idx3-ubyte", said)
        self.assertIn("47040000 bytes, but has 47039000", said)

    def test_flags_that_contradict_each_other_are_refused(self):
        self.assertIn("--use-nested-fsdp", self.run_recipe("--run-without-fsdp", "--use-nested-fsdp", status=2))
        self.assertIn("--ckpt-prefix", self.run_recipe("--resume", status=2))

    def test_wrong_command_line_is_told_with_the_nearest_flag(self):
        said = self.run_recipe("--num_epoch", 2, status=2, ranks=1)
        self.assertIn("mnist: there is no flag '--num_epoch' (did you mean --num-epochs?); mnist --help lists all", said)
        self.assertIn("--batch-size: 'many' is not a whole number from 1 to 1000000", self.run_recipe("--batch_size=many", status=2, ranks=1))
        self.assertIn("--max-steps: '0' is not a whole number from 1 to 1000000000", self.run_recipe("--max-steps", 0, status=2, ranks=1))
        self.assertIn("--seed: '-1' is not a whole number from 0 to", self.run_recipe("--seed", -1, status=2, ranks=1))
        self.assertIn("--lr needs a value", self.run_recipe("--lr", status=2, ranks=1))
        self.assertIn("the value of --ckpt-prefix is empty", self.run_recipe("--ckpt-prefix", "", status=2, ranks=1))
        shown = subprocess.run([MNIST, "--help"], capture_output=True, text=True, check=True).stdout
        self.assertLessEqual(max(map(len, shown.splitlines())), 80)
        self.assertRegex(shown, r"--batch-size INT +Samples per rank and step \(16 unless given\)")
        self.assertIn("in a resumed run, N continues from the checkpoint's", " ".join(shown.split()))
        self.assertIn("Exit status:", shown.splitlines()[-1])

    @unittest.skipIf("TSAN_OPTIONS" in os.environ, "the thread sanitizer needs files of its own")
    def test_full_disk_keeps_the_checkpoint_before(self):
        flags = ["--batch-size", 100, "--ckpt-prefix", self.folder / "net"]
        self.run_recipe("--num-epochs", 1, *flags)
        full = lambda: (resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)), signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        said = self.run_recipe("--resume", "--num-epochs", 2, *flags, status=1, preexec_fn=full)
        self.assertRegex(said, r"can't write .*net-step-000060\.part.*: File too large")
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["net-latest", "net-step-000030", "net_consolidated.pth"])
        self.run_recipe("--resume", "--num-epochs", 2, *flags)

    def interrupt(self, whom):
        """Starts a long run, kills one of its processes after the first checkpoint, and gives what was said and who is left."""
        command = self.command("--num-epochs", 100, "--batch-size", 100, "--ckpt-prefix", self.folder / "net")
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as launcher:
            wait_for(lambda: launcher.poll() is not None or list(self.folder.glob("net-step-*[0-9]")))
            self.assertIsNone(launcher.poll())
            ranks = ranks_of(launcher.pid)
            self.assertEqual(len(ranks), 2)
            os.kill(whom(launcher.pid, ranks), signal.SIGKILL)
            said = launcher.communicate(timeout=300)[0]
        wait_for(lambda: not any(map(runs, ranks)))
        return launcher.returncode, said

    def expect_same_losses_after_going_on(self):
        epochs = max(int(path.name[-6:]) for path in self.folder.glob("net-step-*[0-9]")) // 30 + 1
        flags = ["--batch-size", 100, "--num-epochs", epochs]
        rest = self.metrics("--resume", "--ckpt-prefix", self.folder / "net", *flags, name="rest")
        self.assertEqual(losses(rest), losses(self.metrics(*flags, name="through"))[-30:])

    def test_killed_rank_is_named_and_the_run_can_go_on(self):
        status, said = self.interrupt(lambda launcher, ranks: ranks[1])
        self.assertEqual(status, 137, said)
        self.assertIn("launch: rank 1 was killed by signal 9", said)
        self.assertIn("--max-restarts N", said)
        self.expect_same_losses_after_going_on()

    def test_killed_launcher_leaves_nobody_and_the_run_can_go_on(self):
        status, _ = self.interrupt(lambda launcher, ranks: launcher)
        self.assertEqual(status, -9)
        self.expect_same_losses_after_going_on()


class Devices(Mnist):
    """XLA devices. A process stands for all of them."""

    def command(self, *flags, ranks=2, fake=True):
        if "--num-cores" not in flags:
            return super().command(*flags, ranks=ranks, fake=fake)
        return [MNIST, "--device", "xla", *(["--fake-data"] if fake else []), *map(str, flags)]

    def test_replicas_train_as_ranks_and_go_on_from_their_checkpoint(self):
        flags = ["--batch-size", 100, "--use-nested-fsdp"]
        expected = self.metrics("--num-epochs", 2, *flags, ranks=4, name="ranks")
        prefix = ["--ckpt-prefix", self.folder / "net"]
        on_ranks = self.metrics("--num-epochs", 1, *flags, *prefix, ranks=4, name="first")
        on_replicas = self.metrics("--num-epochs", 2, "--resume", "--num-cores", 4, *flags, *prefix, name="then")
        for own, loss in zip(losses(on_ranks + on_replicas), losses(expected), strict=True):
            self.assertAlmostEqual(own, loss, delta=1e-3)
        self.assertEqual(on_replicas[-1]["accuracy"], on_replicas[-1]["consolidated_accuracy"])
        self.assertAlmostEqual(on_replicas[-1]["accuracy"], expected[-1]["accuracy"], delta=0.2)

    def test_a_run_has_few_programs(self):
        said = self.run_recipe("--num-cores", 2, "--num-epochs", 2, "--batch-size", 400, "--metrics-debug")
        # Of the first step, of the others, of an uneven last one, and of an evaluation.
        self.assertRegex(said, r"XLA devices: 2 of cpu\n  programs +[1-8] compiled, [0-9]+ loaded")
        self.assertNotIn("runs on the CPU", said)

    def test_a_step_is_compiled_for_devices_that_are_not_here(self):
        for way in ([], ["--use-nested-fsdp", "--compute-dtype", "bfloat16"], ["--use-nested-fsdp", "--flatten-parameters"]):
            said = self.run_recipe("--compile-for", "cpu:2", "--num-cores", 1, *way)
            self.assertRegex(said, r"replicas +2\nmemory .*\n(.*\n)*all-gather +[0-9]+, ")


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
