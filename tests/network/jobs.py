"""A training over several hosts of hosts.py, started by itself or by `tessera launch`, whose losses tests compare digit by digit."""
import os
import pathlib
import re
import signal
import sys
import time

import hosts

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1]))
from running import OTHERS, expect, losses_in

RANKS = 2  # of each host
PORT = 29500


def wait_until(condition, seconds, what):
    end = time.monotonic() + seconds
    while not condition():
        expect(time.monotonic() < end, f"after {seconds} s still not: {what}")
        time.sleep(0.02)


class Process:
    """A process on a host, whose output goes to a file."""

    def __init__(self, host, command, log, **variables):
        self.log = log
        with open(log, "w") as out:
            self.process = host.start(command, env={"OMP_NUM_THREADS": 1} | variables, stdout=out, stderr=out)

    def said(self):
        return self.log.read_text(errors="replace")

    def end(self, seconds):
        """The exit status; a process that has not ended by then is an error."""
        wait_until(lambda: self.process.poll() is not None, seconds, f"the end of {self.log.stem}, which said:\n{self.said()}")
        return self.process.returncode

    def send(self, number):
        os.kill(self.process.pid, number)


class Job:
    """mnist with generated pictures over all hosts. Its steps are the same each time, also when it resumes."""

    made = 0

    def __init__(self, net, tools, steps):
        Job.made += 1
        self.net, self.tools = net, tools
        self.folder = net.folder / f"job{Job.made}"
        self.folder.mkdir()
        self.metrics = self.folder / "metrics.jsonl"
        self.program = [tools / "mnist", "--fake-data", "--batch-size", 25, "--num-epochs", 1000, "--max-steps", steps, "--log-steps", 1, "--metrics",
                        self.metrics, "--ckpt-prefix", self.folder / "net", "--save-steps", 10, "--keep", 2, "--no-ckpt-consolidation"]
        self.processes = []

    def start(self, **variables):
        """Each rank as a process of its own, as srun starts them."""
        world = RANKS * len(self.net)
        for rank in range(world):
            host = self.net[rank // RANKS]
            self.processes.append(Process(host, self.program, self.folder / f"rank{rank}.log", RANK=rank, WORLD_SIZE=world, LOCAL_RANK=rank % RANKS,
                                          LOCAL_WORLD_SIZE=RANKS, MASTER_ADDR="node0", MASTER_PORT=PORT, **variables))
        return self

    def launch(self, *flags, **variables):
        """A launcher on each host."""
        for host in self.net:
            self.processes.append(self.launcher(host, *flags, **variables))
        return self

    def launcher(self, host, *flags, **variables):
        command = [self.tools / "tessera", "launch", "-n", RANKS, "--nnodes", len(self.net), "--node-rank", host.index, "--rdzv-endpoint", f"node0:{PORT}",
                   *flags, *self.program]
        log = self.folder / f"launcher{host.index}-{len(self.processes)}.log"
        return Process(host, command, log, **variables)

    def steps(self):
        return len(self.losses())

    def losses(self):
        return losses_in(self.metrics) if self.metrics.exists() else []

    def wait_for_step(self, step, seconds=100):
        def trains():
            ended = [process for process in self.processes if process.process.poll() not in (None, 0)]
            expect(not ended, f"a process ended:\n{ended[0].said() if ended else ''}")
            return self.steps() >= step
        wait_until(trains, seconds, f"step {step}")

    def finish(self, seconds=100):
        """Gives the losses of a job that is to end well."""
        for process in self.processes:
            status = process.end(seconds)
            expect(status == 0, f"{process.log.stem} ended with status {status}:\n{process.said()}")
        return self.losses()

    def expect_errors(self, words, seconds):
        """Every process ends with an error in time; words[i] is a regular expression that matches what process i said, None if it is gone."""
        end = time.monotonic() + seconds
        for process, pattern in zip(self.processes, words):
            if pattern is None:
                continue
            status = process.end(max(0.1, end - time.monotonic()))
            expect(status != 0, f"{process.log.stem} ended well:\n{process.said()}")
            expect(re.search(pattern, process.said()), f"{process.log.stem} did not say '{pattern}' but:\n{process.said()}")


def tools_at(folder):
    """The folder of the programs. From now on nothing in the environment counts for them."""
    for name in [name for name in os.environ if OTHERS.match(name)]:
        del os.environ[name]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    return pathlib.Path(folder).absolute()


def run(tests, shapes):
    """Runs the tests of a script, which is given the folder of the programs and the names of tests (all, if none). shapes[name]: the arguments of
    Hosts, if they are not the usual ones."""
    hosts.enter()
    tools, names = tools_at(sys.argv[1]), sys.argv[2:] or list(tests)
    failed = 0
    for name in names:
        began = time.monotonic()
        with hosts.Hosts(**shapes.get(name, {})) as net:
            try:
                tests[name](net, tools)
                print(f"ok      {name} in {time.monotonic() - began:.1f} s", flush=True)
            except Exception as error:  # of any kind: the others are to run
                failed += 1
                print(f"FAILED  {name}: {type(error).__name__}: {error}", flush=True)
    print(f"{len(names) - failed} passed, {failed} failed")
    sys.exit(failed > 0)
