"""Lists the files of shard and optim in which one training step does something, for docs/architecture.md: runs bench_train for 4 and for 12 steps under
callgrind, and compares what each file costs. Code of a header counts for its header, also where the compiler put it elsewhere.

Builds the benchmark in build/step, with the lines of its code; needs valgrind and what ./quickstart installs.
"""
import collections
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/step"
OF_STEP = re.compile(r".*/tessera/((?:shard|optim)/.*?)\.(?:cpp|h)$")
STEPS = (4, 12)


def costs(steps):
    """Returns how many instructions the code of each file took in a run of so many steps."""
    result = BUILD / f"callgrind.{steps}"
    train = [BUILD / "bin/bench_train", *"--model gpt --width 64 --layers 4 --heads 4 --length 16 --batch 1 --residence gathered --warmup 1".split()]
    subprocess.run(["valgrind", "--tool=callgrind", f"--callgrind-out-file={result}", *train, "--steps", str(steps)],
                   env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True, capture_output=True)
    names, sums, file, is_call = {}, collections.Counter(), "", False
    for line in result.read_text(errors="replace").splitlines():
        if match := re.match(r"(?:fl|fi|fe)=\((\d+)\)(?: (.*))?$", line):
            if match[2]:
                names[match[1]] = match[2]
            file = names[match[1]]
        elif match := re.match(r"c(?:fi|fl)=\((\d+)\) (.*)$", line):
            names[match[1]] = match[2]
        elif line.startswith("calls="):
            is_call = True  # the next line has what the callee took
        elif re.match(r"[+*\-\d]", line):
            if not is_call:
                sums[file] += int(line.split()[1])
            is_call = False
    return sums


def main():
    subprocess.run(["cmake", "--preset", "release", "-B", BUILD, "-DCMAKE_CXX_FLAGS=-g1", "-DTESSERA_TESTS=OFF",
                    f"-DTESSERA_PYTHON={ROOT}/build/python/bin/python"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["cmake", "--build", BUILD, "--target", "bench_train"], check=True, stdout=subprocess.DEVNULL)
    few, many = (costs(steps) for steps in STEPS)
    entered = collections.Counter()
    for file in many:
        if match := OF_STEP.match(file):
            entered[match[1]] += many[file] - few[file]
    entered = {file: cost for file, cost in entered.items() if cost > 0}
    print(f"{len(entered)} files of shard and optim, with instructions a step:")
    for file, cost in sorted(entered.items()):
        print(f"{cost // (STEPS[1] - STEPS[0]):10,}  {file}")


if __name__ == "__main__":
    main()
