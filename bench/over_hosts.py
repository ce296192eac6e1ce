"""Runs the benchmarks' programs as jobs on several hosts of one machine: namespaces of the network, whose links have a given speed."""
import json
import pathlib
import secrets
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build"
sys.path.insert(0, str(ROOT / "tests/network"))
import hosts  # noqa: E402

# How a model is sharded over hosts: flags of bench_train and variables.
STRATEGIES = {
    "one level": (["--residence", "gathered"], {"TESSERA_LEVELS": 1}),
    "two levels": (["--residence", "gathered"], {"TESSERA_LEVELS": 2}),
    "node-shared": (["--residence", "node-shared"], {"TESSERA_LEVELS": 2}),
    "ZeRO-2": (["--residence", "gathered", "--zero", "2"], {"TESSERA_LEVELS": 2}),
    "hybrid": (["--by-host"], {"TESSERA_LEVELS": 2}),
}


def enter(name):
    """Makes the namespaces, or ends this program with the reason why there are none."""
    if not (BUILD / "bin/bench_train").exists():
        sys.exit(f"bench/{name}: build/bin/bench_train is not built; run bench/setup first")
    hosts.enter()


def job(net, ranks, program, **variables):
    """Runs a program as `ranks` ranks on each host. Returns what rank 0 prints."""
    environment = {"OMP_NUM_THREADS": 1, "TESSERA_SECRET": secrets.token_hex(16), **variables}
    launch = [BUILD / "bin/tessera", "launch", "--quiet", "-n", ranks]
    if len(net) > 1:
        launch += ["--nnodes", len(net), "--rdzv-endpoint", "node0:29500"]
    running = [net[i].start([*launch, *(["--node-rank", i] if len(net) > 1 else []), *program], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True) for i in range(len(net))]
    said = [process.communicate(timeout=1200) for process in running]
    if any(process.returncode for process in running):
        sys.exit(f"{' '.join(map(str, program))} failed on {len(net)} hosts:\n" + "\n".join(err[-2000:] for _, err in said))
    return said[0][0]


def row_of(printed):
    """The row in what bench_train prints."""
    row = next(line for line in printed.splitlines() if '"median_ms"' in line)
    return json.loads(row[row.index("{"):])  # behind the number of the rank


def train(net, ranks, strategy, *flags, **more):
    """The row that bench_train prints, trained in one of the ways of STRATEGIES."""
    own, variables = STRATEGIES[strategy]
    return row_of(job(net, ranks, [BUILD / "bin/bench_train", *own, *flags], **variables, **more))
