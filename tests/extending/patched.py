"""Copies the files that the patches beside it change, and applies them to the copies: patched.py ROOT FOLDER"""
import os
import pathlib
import re
import shutil
import subprocess
import sys


def apply(*arguments):
    """The folder lies in a repository, of which git would change nothing: it must not look there."""
    return subprocess.run(["git", "apply", *arguments], cwd=folder, env={**os.environ, "GIT_CEILING_DIRECTORIES": str(folder.parent)},
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)


root, folder = (pathlib.Path(argument).resolve() for argument in sys.argv[1:])
for patch in sorted((root / "tests/extending").glob("*.patch")):
    for name in re.findall(r"^\+\+\+ b/(.*)$", patch.read_text(), re.M):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(root / name, folder / name)
    done = apply(patch)
    if done.returncode != 0 and apply("--check", "--reverse", patch).returncode != 0:  # unless somebody has adopted the example
        sys.exit(f"{patch.relative_to(root)} does not fit the files any more; bring it up to date:\n{done.stdout}")
