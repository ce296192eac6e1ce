"""Looks up what docs/coming-from.md names: coming_from.py ROOT BUILD

On the left, names of PyTorch and Accelerate must be there in their packages, as attributes or as arguments. On the right, names of Tessera must stand in its
headers and be used by a test or an example, those of one piece of code by one and the same; keys stand in the table of keys, and commands and flags in helps.
"""
import importlib.util
import inspect
import pathlib
import re
import subprocess
import sys

THEIRS = {
    "FSDP2 and FSDP1": ["torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.distributed.checkpoint.state_dict", "torch.utils.checkpoint",
                        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper", "torch.distributed.device_mesh", "torch.distributed.tensor",
                        "torch.distributed.fsdp.wrap", "torch.distributed.fsdp.sharded_grad_scaler", "torch.nn.utils", "torch.autograd.graph",
                        "torch.amp", "torch"],
    "Looking at runs": ["torch.profiler", "torch._subclasses.fake_tensor", "torch"],
    "DDP": ["torch.distributed", "torch.nn.parallel", "torch.nn", "torch.utils.data", "torch.utils.data.distributed", "torch.distributed.optim"],
    "Accelerate": ["accelerate", "accelerate.utils", "accelerate.optimizer", "accelerate.scheduler"],
}
# Of the program in an example, or of what a row says in words.
FREE = {"with", "n", "tessera", "data", "nn", "optim", "checkpoint", "activation", "xla", "model", "module", "f", "x", "p", "mesh_2d", "Block", "world",
        "true", "True", "False", "torch", "state", "hook", "dataset", "loader", "optimizer", "scheduler", "loss", "values", "object", "seed",
        "parameters", "inputs", "tensor", "FSDP", "distributed", "checkpoint_module", "torch_xla", "XLA"}
WORD = re.compile(r"[A-Za-z_]\w*")


def rows_of(page):
    """The section of each row, and the code in its two cells."""
    section = ""
    for line in page.read_text().splitlines():
        if line.startswith("## "):
            section = line[3:]
        cells = line.strip("|").split(" | ") if line.startswith("| ") else []
        if len(cells) == 2 and "---" not in line and not cells[1].startswith("here"):
            yield section, *(re.findall(r"`([^`]+)`", cell) for cell in cells)


def names_in(code):
    return set(WORD.findall(re.sub(r'"[^"]*"', "", code)))


def known_of(modules):
    """What modules have, with the members of classes and the arguments of all that can be called."""
    known, waiting = set(), [importlib.import_module(name) for name in modules]
    classes = 0
    for module in list(waiting):
        for name, value in vars(module).items():
            known.add(name)
            if inspect.isclass(value):
                waiting.append(value)
                known.update(dir(value))
                classes += 1
            if callable(value):
                known.update(arguments_of(value))
    for value in waiting[len(modules):]:
        for _, member in inspect.getmembers(value, callable):
            known.update(arguments_of(member))
    assert classes > 5, modules
    return known


def arguments_of(value):
    try:
        return inspect.signature(value).parameters
    except (TypeError, ValueError):
        return ()


def help_of(*command):
    return subprocess.run([*command, "--help"], capture_output=True, text=True, check=True).stdout


def main(root, build):
    public = " ".join(path.read_text() for path in (root / "tessera").rglob("*.h"))
    api = set(WORD.findall(public))
    patterns = ("tessera/**/*_test.cpp", "tests/**/*.cpp", "examples/*.cpp", "recipes/*.cpp")
    users = [set(WORD.findall(path.read_text())) for pattern in patterns for path in root.glob(pattern)]
    keys = (root / "docs/tables/configuration-keys.md").read_text()
    tessera = str(build / "bin/tessera")
    helps = {"tessera": help_of(tessera), "ckpt": help_of(tessera, "ckpt"), "flags": help_of(tessera, "launch") + help_of(str(build / "bin/llama"))}
    theirs = {section: known_of(modules) for section, modules in THEIRS.items() if importlib.util.find_spec(modules[0])}  # Accelerate may be missing
    wrong, count = [], 0
    for section, left, right in rows_of(root / "docs/coming-from.md"):
        count += 1
        for code in left if section in theirs else []:
            if not code.startswith(("accelerate ", "torchrun ")):
                wrong += [f"{section}: {name} of `{code}` is not there" for name in sorted(names_in(code) - FREE - theirs[section])]
        for code in right:
            if code.startswith("tessera "):
                words = re.findall(r"(?<= )[a-z][\w-]*", code.split(" --")[0])
                if not all(re.search(rf"^  {word} ", helps[where], re.M) for where, word in zip(("tessera", "ckpt"), words)):
                    wrong.append(f"{section}: there is no command `{code}`")
            for flag in re.findall(r"--[\w-]+", code):
                if not re.search(rf"{flag}\b", helps["flags"]):
                    wrong.append(f"{section}: no help has {flag}")
            if re.fullmatch(r"(fsdp|tessera|parallelism|mixed|gradient)_\w+", code):
                if f"| `{code}` |" not in keys:
                    wrong.append(f"{section}: there is no key `{code}`")
            elif not code.startswith(("tessera ", "--", "build/")):
                names = (names_in(code) & api) - FREE
                if not any(names <= used for used in users):
                    wrong.append(f"{section}: no test uses all of `{code}`: {sorted(names)}")
                named = re.findall(r"(?:tessera::|optim::|xla::|trainer\.|world\.|(?<![\w.)])\.)(\w+)", code)
                wrong += [f"{section}: {name} of `{code}` is in no header" for name in named if name not in api]
    if count < 80:
        wrong.append(f"only {count} rows were found; has the form of the tables changed?")
    print("\n".join(wrong) or f"{count} rows are true")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(*map(pathlib.Path, sys.argv[1:3])))
