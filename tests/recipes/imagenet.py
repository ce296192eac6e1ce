"""Runs the recipe for images as a person would, on small pictures of coloured boxes, and looks at what it learns, saves and refuses."""
import json
import pathlib
import random
import re
import subprocess
import sys
import tarfile
import tempfile
import unittest

from recipe import Recipe, losses

try:
    from PIL import Image
except ImportError:
    Image = None

LAUNCHER, IMAGENET = sys.argv[1], sys.argv[2]
CLASSIFY = pathlib.Path(IMAGENET).resolve().parents[1] / "examples/classify"
ROOT = pathlib.Path(__file__).resolve().parents[2]
COLOURS = {"blue": (60, 60, 200), "green": (60, 200, 60), "red": (200, 60, 60)}
TRAINING, TESTING = 72, 31  # an uneven number to test with
SMALL = ["--model", "resnet18", "--image-size", 32, "--test-set-batch-size", 8]
TINY_VIT = ["--model", "vit_tiny_patch16_224", "--image-size", 32]
READ = """
import sys, torch
sys.path.insert(0, sys.argv[2])
import torchvision_python
import torchvision
saved = torch.load(sys.argv[1], weights_only=True)["model"]
model = torchvision.models.resnet18(num_classes=3)
model.load_state_dict(saved)
print(float(model.eval()(torch.ones(1, 3, 32, 32)).sum().isfinite()))
"""


def write_pictures(folder):
    """folder/train and folder/val, each with a folder for each colour: a box of the colour on a grey ground."""
    draw = random.Random(1)
    for split, count in (("train", TRAINING), ("val", TESTING)):
        for number in range(count):
            name = sorted(COLOURS)[number % len(COLOURS)]
            place = folder / split / name
            place.mkdir(parents=True, exist_ok=True)
            picture = Image.new("RGB", (64, 48), (draw.randrange(90, 166),) * 3)
            left, top = draw.randrange(32), draw.randrange(24)
            picture.paste(COLOURS[name], (left, top, left + 32, top + 24))
            picture.save(place / f"{number:03}.jpg", quality=90)


@unittest.skipIf(Image is None, "build/python has no package Pillow")
class Images(Recipe):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.pictures = pathlib.Path(folder.name) / "pictures"
        write_pictures(cls.pictures)

    def command(self, *flags, ranks=2, data=None):
        given = ["--datadir", self.pictures] if data is None else data
        launch = [LAUNCHER, "launch", "--nproc-per-node", ranks] if ranks > 0 else []
        return [*launch, IMAGENET, *given, *flags]


class Training(Images):
    FLAGS = [*SMALL, "--lr", 0.05, "--use_nested_fsdp", "--batch-size"]

    def test_learns_and_goes_on_and_torchvision_reads_it(self):
        flags = [*SMALL, "--optimizer", "adamw", "--lr", 0.001, "--lr-scheduler-type", "cosine", "--use_nested_fsdp", "--batch-size"]
        prefix = ["--ckpt-prefix", self.folder / "net"]
        rows = self.metrics(*flags, 6, *prefix, "--num_epochs", 6, "--test_only_at_end", "--target_accuracy", 90)
        self.assertEqual(len(losses(rows)), 6 * TRAINING // 12)
        self.assertLess(sum(losses(rows)[-6:]), sum(losses(rows)[:6]) / 2)
        tested = [row for row in rows if "accuracy" in row]
        self.assertEqual(len(tested), 1)
        right = tested[0]["accuracy"] / 100 * TESTING
        self.assertAlmostEqual(right, round(right), delta=1e-4)  # each picture counts once
        self.assertEqual(tested[0]["accuracy_top_5"], 100)  # of three classes
        self.assertEqual([row["consolidated_accuracy"] for row in rows if "consolidated_accuracy" in row], [tested[0]["accuracy"]])
        self.assertEqual([row["lr"] for row in rows if "lr" in row][:2], [0.0002, 0.0004])

        consolidated = self.folder / "net_consolidated.pth"
        same = self.metrics(*SMALL, "--weights", consolidated, "--num-epochs", 0, name="same", ranks=1)
        self.assertAlmostEqual(same[0]["accuracy"], tested[0]["accuracy"], delta=1e-4)
        read = subprocess.run([sys.executable, "-c", READ, consolidated, ROOT / "tests/python"], capture_output=True, text=True)
        if "there is no torchvision" not in read.stderr:
            self.assertEqual(read.stdout.split()[-1:], ["1.0"], read.stderr)

        said = self.run_recipe(*flags, 4, *prefix, "--num-epochs", 7, "--resume", "--no-ckpt-consolidation", "--target-accuracy", 90,
                               "--weights", consolidated, ranks=3)
        self.assertIn("net-step-000036", said)
        self.assertIn("so --weights is not used", said)
        self.assertIn("step 42: accuracy", said)
        self.run_recipe(*SMALL, "--num-epochs", 0, "--target-accuracy", 90, status=21, ranks=1)

    def test_resumed_run_has_the_losses_of_one_that_went_through(self):
        flags = [*self.FLAGS, 6, "--num-epochs", 2, "--ema", 0.9, "--lr-scheduler-divide-every-n-epochs", 1, "--lr-scheduler-divisor", 2]
        through = self.metrics(*flags, name="through")
        prefix = ["--ckpt-prefix", self.folder / "net", "--no-ckpt-consolidation", "--num-workers", 0]
        parts = self.metrics(*flags, "--max-steps", 4, *prefix, name="parts")  # in the middle of an epoch
        self.assertEqual(losses(parts), losses(through)[:4])
        parts = self.metrics(*flags, "--resume", *prefix, name="parts")
        self.assertEqual(losses(parts), losses(through))
        # Buffers were averaged over the ranks where the run was saved, so the test may differ by a picture.
        self.assertAlmostEqual(parts[-1]["accuracy"], through[-1]["accuracy"], delta=10)
        self.assertEqual([row["lr"] for row in through if "lr" in row][-1], 0.025)
        said = self.run_recipe(*self.FLAGS, 6, "--num-epochs", 2, "--resume", *prefix)
        self.assertIn("has a moving average, which is not loaded and ends here; to keep it, give --ema", said)


class Options(Images):
    FLAGS = [*SMALL, "--batch-size", 6, "--max-steps", 3, "--num-epochs", 1, "--channels-last"]

    def test_sharding_and_tar_files_change_no_loss(self):
        data = self.folder / "shards"
        for split in ("train", "val"):
            (data / split).mkdir(parents=True)
            pictures = sorted((self.pictures / split).glob("*/*.jpg"))
            half = len(pictures) // 2
            for number, part in enumerate((pictures[:half], pictures[half:])):
                with tarfile.open(data / split / f"{number:03}.tar", "w") as archive:
                    for picture in part:
                        label = self.folder / "label"
                        label.write_text(str(sorted(COLOURS).index(picture.parent.name)))
                        archive.add(picture, f"{picture.parent.name}-{picture.stem}.jpg")
                        archive.add(label, f"{picture.parent.name}-{picture.stem}.cls")
        expected = losses(self.metrics(*self.FLAGS, name="folders"))
        self.assertEqual(losses(self.metrics(*self.FLAGS, data=["--datadir", data], name="shards")), expected)
        for number, more in enumerate((["--auto-wrap-policy", "type_based", "--flatten_parameters", "--use-gradient-checkpointing"],
                                       ["--auto_wrap_policy=size_based", "--auto_wrap_min_num_params=1e5", "--shard_param_on_dim_0"])):
            for own, other in zip(losses(self.metrics(*self.FLAGS, *more, name=str(number))), expected, strict=True):
                self.assertAlmostEqual(own, other, delta=2e-4, msg=more)

    def test_all_that_a_vit_trains_with(self):
        flags = [*TINY_VIT, "--batch-size", 6, "--num-epochs", 1, "--optimizer", "adamw", "--lr", 0.001, "--lr-scheduler-type", "cosine",
                 "--num-warmup-epochs", 0.5, "--weight-decay", 0.05, "--rand-augment", "--mixup", 0.2, "--cutmix", 1, "--label-smoothing", 0.1, "--ema", 0.5,
                 "--use-nested-fsdp", "--compute-dtype", "bfloat16", "--fp32_reduce_scatter", "--num-workers", 1]
        rows = self.metrics(*flags, "--output", self.folder / "tuned")
        rates = [row["lr"] for row in rows if "lr" in row]
        self.assertEqual(len(rates), 6)
        self.assertLess(rates[-1], 0.001)
        accuracy = [row["accuracy"] for row in rows if "accuracy" in row]
        same = ["--use-nested-fsdp", "--compute-dtype", "bfloat16"]
        again = self.metrics(*TINY_VIT, "--num-epochs", 0, "--weights", self.folder / "tuned", *same, name="again")
        self.assertAlmostEqual(again[0]["accuracy"], accuracy[-1], delta=1e-4)
        (self.folder / "two").mkdir()
        for split in ("train", "val"):
            (self.folder / "two" / split).mkdir()
            for name in ("blue", "red"):
                (self.folder / "two" / split / name).symlink_to(self.pictures / split / name)
        other = [*TINY_VIT, "--weights", self.folder / "tuned", "--num-epochs", 0]
        said = self.run_recipe(*other, data=["--datadir", self.folder / "two"], ranks=0, status=1)
        self.assertIn("if it was saved for other classes, begin a run with --weights FILE --new-head", said)
        self.run_recipe(*other, "--new-head", data=["--datadir", self.folder / "two"], ranks=1)

    def test_generated_images_and_a_trace(self):
        flags = ["--model", "resnet18", "--image_size", 32, "--batch_size", 4, "--num_steps", 6, "--lr_scheduler_type", "none", "--profile", "--logdir"]
        said = self.run_recipe(*flags, self.folder / "log", data=["--fake_data", "--use_small_fake_sample"])
        self.assertIn("step 6: accuracy", said)
        self.assertEqual(len(list((self.folder / "log").glob("profile_*.json"))), 2)
        self.assertEqual(len(list((self.folder / "log").glob("events.out.tfevents.*"))), 1)


class Trouble(Images):
    def test_damaged_pictures_end_the_run_unless_they_are_skipped(self):
        whole = next((self.pictures / "val/red").glob("*.jpg")).read_bytes()
        for name in COLOURS:
            for place, count, cut in (("train", 2, 2), ("val", 4, 2 if name == "red" else 0)):
                folder = self.folder / place / name
                folder.mkdir(parents=True)
                for number in range(count):
                    (folder / f"{number}.jpg").write_bytes(whole[: 400 * number + 200] if number < cut else whole)
        data = ["--datadir", self.folder]
        self.assertRegex(self.run_recipe(*SMALL, "--num-epochs", 0, data=data, status=1, ranks=0), r"val/red/[01]\.jpg.*; with --skip-damaged")
        file = self.folder / "metrics.jsonl"
        flags = [*SMALL, "--batch-size", 3, "--num-epochs", 1, "--skip-damaged", "--log-steps", 1, "--metrics", file]
        said = self.run_recipe(*flags, data=data, status=1, ranks=0)
        self.assertIn("not one picture could be decoded, but 6 are damaged", said)
        self.assertEqual(losses(map(json.loads, file.read_text().splitlines())), [0, 0])  # no picture of a batch counts
        for name in COLOURS:
            (self.folder / "train" / name / "9.jpg").write_bytes(whole)
        for workers, ranks in ((0, 0), (1, 0), (1, 2)):
            file.unlink()
            said = self.run_recipe(*flags, "--num-workers", workers, data=data, ranks=ranks)
            self.assertIn("8 pictures could not be decoded", said)
            self.assertIn("val/red/0.jpg", said)
            if ranks == 0:
                self.assertEqual(said.count("a damaged picture counts for nothing"), 8)
            rows = [json.loads(line) for line in file.read_text().splitlines()]
            self.assertAlmostEqual(rows[-1]["accuracy_top_5"], 100, delta=1e-4)  # of the ten that are whole

    @unittest.skipUnless(CLASSIFY.exists(), "the example classify is not built")
    def test_the_example_says_what_it_can_not_read(self):
        self.run_recipe(*SMALL, "--num-epochs", 0, "--output", self.folder / "net", ranks=0)
        (self.folder / "one").mkdir()
        (self.folder / "one/red").symlink_to(self.pictures / "val/red")
        (self.folder / "bad.jpg").write_text("hello")
        picture = next((self.pictures / "val/red").glob("*.jpg"))
        for folder, size, name, status, words in ((self.pictures / "val", 32, picture, 0, " %)"), (self.pictures / "val", "abc", picture, 2, "SIZE is"),
                                                  (self.pictures / "val", 0, picture, 2, "SIZE is"),
                                                  (self.pictures / "val", 32, self.folder / "bad.jpg", 1, "it begins with 'hello'"),
                                                  (self.folder / "one", 32, picture, 1, "must be those it was trained with")):
            said = self.run_program(CLASSIFY, "resnet18", self.folder / "net", folder, size, status=status, input=f"{name}\n")
            self.assertIn(words, said)

    def test_wrong_data_is_named(self):
        self.assertIn("nowhere", self.run_recipe("--model", "resnet18", data=["--datadir", self.folder / "nowhere"], status=1, ranks=0))
        for split, name in (("train", "blue"), ("val", "red")):
            (self.folder / split).mkdir()
            (self.folder / split / name).symlink_to(self.pictures / split / name)
        said = self.run_recipe(*SMALL, data=["--datadir", self.folder], status=1, ranks=0)
        self.assertIn("val/ lacks the class 'blue' of train/", said)

    def test_wrong_flags_are_told(self):
        fake = ["--fake-data"]
        for flags, words in (([], "give either --datadir"), ([*fake, "--datadir", self.folder], "give either --datadir"),
                             ([*fake, "--model", "resnet5"], "'resnet5' is not one of alexnet"), ([*fake, "--num_step", 3], "did you mean --num-steps?"),
                             ([*fake, "--use-nested-fsdp", "--auto-wrap-policy", "size_based"], "leave one of them out"),
                             ([*fake, "--pin_layout_in_collective_ops"], "leave it out"), ([*fake, "--profiler_port", 9012], "--profile writes"),
                             ([*fake, "--optimizer", "adamw", "--momentum", 0.9], "--momentum is of SGD"),
                             ([*fake, "--test-only-at-end", "--eval-interval", 2], "--test-only-at-end"),
                             ([*fake, "--auto-wrap-min-num-params", 100], "size_based"), ([*fake, "--new-head"], "--weights"),
                             ([*fake, "--model", "inception_v3", "--image-size", 74], "inception_v3 takes images of at least 75; raise --image-size"),
                             ([*fake, "--model", "vit_tiny_patch16_224", "--image-size", 30], "patches of 16 by 16; give a multiple of 16"),
                             ([*fake, "-n", 2], "tessera launch -n 2 imagenet")):
            self.assertIn(words, self.run_recipe(data=flags, status=2, ranks=0))
        said = self.run_recipe(*SMALL, "--fp32-reduce-scatter", data=[*fake, "--use-small-fake-sample"], status=1, ranks=0)
        self.assertIn("float32 as it is", said)

    def test_help_has_all_flags_of_the_example(self):
        shown = subprocess.run([IMAGENET, "--help"], capture_output=True, text=True, check=True).stdout
        self.assertLessEqual(max(map(len, shown.splitlines())), 80)
        for flag in ("model test-set-batch-size lr-scheduler-type lr-scheduler-divide-every-n-epochs lr-scheduler-divisor test-only-at-end num-warmup-epochs "
                     "eval-interval flatten-parameters auto-wrap-policy auto-wrap-min-num-params use-nested-fsdp use-gradient-checkpointing compute-dtype "
                     "fp32-reduce-scatter shard-param-on-dim-0 use-small-fake-sample profile datadir logdir num-cores batch-size num-epochs num-steps "
                     "num-workers log-steps lr momentum target-accuracy drop-last fake-data metrics-debug").split():
            self.assertRegex(shown, rf"--{re.escape(flag)}\b")
        self.assertRegex(shown, r"--num-warmup-epochs FLOAT\s+[^-]*0\.9 unless\s+given")
        self.assertIn("vit_giant_patch14_224", shown)


class Devices(Images):
    """XLA devices. A process stands for all of them."""

    def test_replicas_train_as_ranks(self):
        flags = [*TINY_VIT, "--batch-size", 6, "--test-set-batch-size", 16, "--max-steps", 3, "--num-epochs", 1, "--use-nested-fsdp", "--optimizer", "adamw"]
        on_ranks = self.metrics(*flags, name="ranks")
        on_replicas = self.metrics(*flags, "--device", "xla", "--num-cores", 2, name="replicas", ranks=1)
        for own, other in zip(losses(on_replicas), losses(on_ranks), strict=True):
            self.assertAlmostEqual(own, other, delta=1e-3)
        right = on_replicas[-1]["accuracy"] / 100 * TESTING
        self.assertAlmostEqual(right, round(right), delta=1e-4)  # each picture counts once
        self.assertAlmostEqual(on_replicas[-1]["accuracy"], on_ranks[-1]["accuracy"], delta=10)


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0], *sys.argv[3:]])
