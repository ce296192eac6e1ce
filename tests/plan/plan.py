"""Compares plans with runs: plan.py TESSERA PROGRAM PAGE [--long]. Each case trains for real and as a dry run. It fails if the peaks differ by more
than 5 %; step times are printed beside each other. With TESSERA_TEST_WRITE_PAGES=1 the page gets the table anew, with all cases."""
import json
import os
import pathlib
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))
from running import BOUND, ENVIRONMENT  # noqa: E402

LIMIT = 0.05
BEGIN, END = "<!-- measured by tests/plan/plan.py -->\n", "<!-- end -->\n"
# Ranks, flags of the program.
QUICK = [
    (2, "--model gpt"),
    (2, "--model gpt --residence node-shared"),
    (1, "--model gpt"),
    (2, "--model llama --width 768 --lora 8 --residence node-shared"),
    (2, "--model mlp --width 1536 --layers 8 --in-backward"),
]
LONG = [
    (1, "--model gpt --width 768 --layers 6"),
    (2, "--model gpt --width 768 --layers 6"),
    (2, "--model gpt --width 768 --layers 6 --residence node-shared"),
    (2, "--model gpt --width 1024 --layers 8"),
    (2, "--model gpt --width 1024 --layers 8 --checkpointing"),
    (2, "--model gpt --width 768 --layers 6 --in-backward --residence node-shared"),
    (2, "--model llama --width 768 --layers 6"),
    (1, "--model llama --width 768 --layers 6 --lora 16"),
    (2, "--model llama --width 768 --layers 6 --checkpointing --in-backward"),
    (2, "--model gpt --width 768 --layers 6 --bf16"),
    (1, "--model mlp --width 2048 --layers 8 --in-backward"),
]
OPTIONS = {"TESSERA_POISON": "0", "OMP_NUM_THREADS": "1"}
# The peak of memory that is in use, and not of what libc and libraries keep for later. This takes time for page faults.
KEEP_NOTHING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_TOP_PAD_": "65536", "MALLOC_ARENA_MAX": "1",
                "MKL_DISABLE_FAST_MM": "1"}


def output_of(*command, **variables):
    ended = subprocess.run([*BOUND, *map(str, command)], env={**ENVIRONMENT, **OPTIONS, **variables}, stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE, text=True, timeout=600)
    if ended.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {ended.returncode}:\n{ended.stdout[-2000:]}{ended.stderr[-4000:]}")
    return ended.stdout


class Comparison:
    def __init__(self, tessera, program, folder):
        self.tessera, self.program, self.folder = tessera, program, folder

    def launch(self, ranks, *command, **variables):
        return output_of(self.tessera, "launch", "--quiet", "-n", ranks, *command, **variables)

    def measured(self, ranks, flags, **variables):
        printed = self.launch(ranks, self.program, *flags.split(), **variables)
        return json.loads(printed[printed.index("{"):printed.rindex("}") + 1])

    def planned(self, ranks, flags, machine="cpu"):
        out = self.folder / "plan.json"
        self.launch(ranks, "--dry-run", self.program, *flags.split(), TESSERA_DRY_RUN_OUT=str(out), TESSERA_MACHINE=machine)
        return json.loads(out.read_text())

    def peaks(self, ranks, flags):
        """In MB."""
        return self.measured(ranks, flags, **KEEP_NOTHING)["peak_mb"], self.planned(ranks, flags)["memory"]["peak"] / 1e6

    def steps(self, ranks, flags):
        """In seconds. The machine is measured just before, because others may use it, too."""
        machine = str(self.folder / "machine.json")
        self.launch(ranks, self.tessera, "test", "--calibrate", machine)
        return self.measured(ranks, flags)["step_s"], self.planned(ranks, flags, machine)["time"]["step"]


def main():
    tessera, program, page, *more = sys.argv[1:]
    writes = os.environ.get("TESSERA_TEST_WRITE_PAGES") == "1"
    cases = QUICK + (LONG if writes or "--long" in more else [])
    lines = ["| ranks | run | peak, measured | planned | off by | step, measured | planned | off by |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        comparison = Comparison(tessera, program, pathlib.Path(folder))
        for ranks, flags in cases:
            peak, planned_peak = comparison.peaks(ranks, flags)
            off = planned_peak / peak - 1
            line = f"| {ranks} | `{flags}` | {peak:.0f} MB | {planned_peak:.0f} MB | {100 * off:+.1f} % |"
            if writes:
                step, planned_step = comparison.steps(ranks, flags)
                line += f" {step:.2f} s | {planned_step:.2f} s | {100 * (planned_step / step - 1):+.0f} % |"
            lines.append(line)
            print(line, flush=True)
            if abs(off) > LIMIT:
                wrong.append(f"{flags} on {ranks} ranks: the plan is off by {100 * off:+.1f} %")
    if writes:
        text = pathlib.Path(page).read_text()
        begin, end = text.index(BEGIN) + len(BEGIN), text.index(END)
        pathlib.Path(page).write_text(text[:begin] + "\n" + "\n".join(lines) + "\n\n" + text[end:])
    print("\n".join(wrong) or f"{len(cases)} plans are within {100 * LIMIT:.0f} % of what was measured")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
