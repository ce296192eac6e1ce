"""Runs a recipe as a person would: the base of the tests of each recipe, which say with command() how it is started."""
import json
import pathlib
import subprocess
import tempfile
import unittest


def losses(rows):
    return [row["loss"] for row in rows if "loss" in row]


class Recipe(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def run_program(self, *command, status=0, **more):
        done = subprocess.run([str(word) for word in command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **more)
        self.assertEqual(done.returncode, status, done.stdout)
        return done.stdout

    def run_recipe(self, *flags, status=0, env=None, preexec_fn=None, **more):
        return self.run_program(*self.command(*flags, **more), status=status, env=env, preexec_fn=preexec_fn)

    def metrics(self, *flags, name="metrics", **more):
        """Returns a row for each step and test, without what differs from run to run. self.said is what the recipe printed."""
        file = self.folder / f"{name}.jsonl"
        self.said = self.run_recipe("--metrics", file, "--log-steps", 1, *flags, **more)
        measured = {"memory", "samples_per_second", "mfu"}
        return [{name: value for name, value in json.loads(line).items() if name not in measured} for line in file.read_text().splitlines()]
