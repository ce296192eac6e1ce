"""Cuts, slows down and kills at random, while jobs train on three hosts and are started again: each ends with the result of an undisturbed one.

chaos.py BUILD_BIN [--seconds S] [--seed N]
"""
import argparse
import contextlib
import os
import random
import signal
import sys
import time

import hosts
import jobs
from jobs import RANKS, Job, expect, wait_until

STEPS, FLAGS = 40, ("--max-restarts", 100, "--node-timeout", 10)
LONGEST_CUT = 12  # node 0 needs 10 s to miss a node, and then waits for it for 10 s


def ranks_on(host):
    def is_rank(pid):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                return file.read().split(b"\0")[0].endswith(b"/mnist")
        except OSError:
            return False
    return [pid for pid in host.processes() if is_rank(pid)]


class Chaos:
    def __init__(self, net, job, draw):
        self.net, self.job, self.draw = net, job, draw

    def cut_a_host(self):
        host, seconds = self.draw.randrange(3), self.draw.uniform(0.2, LONGEST_CUT)
        self.net.cut(host)
        time.sleep(seconds)
        self.net.mend(host)
        return f"cut node {host} off for {seconds:.1f} s"

    def cut_two_apart(self):
        (one, two), seconds = self.draw.sample(range(3), 2), self.draw.uniform(0.2, LONGEST_CUT)
        self.net.cut(one, two)
        time.sleep(seconds)
        self.net.mend(one, two)
        return f"cut nodes {one} and {two} apart for {seconds:.1f} s"

    def worsen_a_link(self):
        host, shape = self.draw.randrange(3), {"delay": self.draw.choice([0, 0.001, 0.01]), "loss": self.draw.choice([0, 0.002, 0.02]),
                                               "rate": self.draw.choice([None, "50mbit", "1gbit"])}
        self.net.shape(host, **shape)
        return f"gave node {host} the link {shape}"

    def kill_a_rank(self):
        host = self.net[self.draw.randrange(3)]
        ranks = ranks_on(host)
        if ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.draw.choice(ranks), signal.SIGKILL)
        return f"killed a rank of node {host.index}"

    def replace_a_launcher(self):
        """The launcher of a node that is not node 0 dies, and somebody starts another one."""
        node = self.draw.randrange(1, 3)
        self.job.processes[node].send(signal.SIGKILL)
        self.job.processes[node].process.wait()
        self.start_anew(node)
        return f"replaced the launcher of node {node}"

    def restart_a_host(self):
        node = self.draw.randrange(1, 3)
        self.net.shape(node)
        self.net.vanish(node)
        self.net.boot(node)
        self.job.processes[node].process.wait()
        self.start_anew(node)
        return f"started host {node} anew"

    def start_anew(self, node):
        """Starts another launcher, unless the job has ended meanwhile: it would wait for the next job."""
        has_ended = self.job.processes[0].process.poll() is not None
        self.job.processes[node] = self.job.processes[0] if has_ended else self.job.launcher(self.net[node], *FLAGS)

    def disturb(self):
        events = [self.cut_a_host, self.cut_two_apart, self.worsen_a_link, self.kill_a_rank, self.replace_a_launcher, self.restart_a_host]
        return self.draw.choice(events)()

    def has_ended(self):
        return all(process.process.poll() is not None for process in self.job.processes)


def undisturbed_losses(net, tools):
    return Job(net, tools, STEPS).launch(*FLAGS).finish()


def one_job(net, tools, expected, draw):
    job = Job(net, tools, STEPS).launch(*FLAGS)
    chaos = Chaos(net, job, draw)
    events = []
    try:
        for _ in range(draw.randrange(1, 5)):
            job_began = job.steps()
            wait_until(lambda: job.steps() != job_began or chaos.has_ended(), 200, "the job trains")
            time.sleep(draw.uniform(0, 2))
            if chaos.has_ended():
                break
            events.append(chaos.disturb())
        found = job.finish(300)
        expect(found == expected, f"the losses are\n{found}\nbut undisturbed\n{expected}")
    except AssertionError as error:
        raise AssertionError("; ".join(events) + f"\n{error}\n" + "\n".join(f"{one.log.stem}:\n{one.said()}" for one in job.processes)) from None
    finally:
        for host in net:
            host.kill()
            net.shape(host.index)
    return events


def main():
    hosts.enter()
    parser = argparse.ArgumentParser()
    parser.add_argument("bin")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32))
    given = parser.parse_args()
    tools = jobs.tools_at(given.bin)
    end = time.monotonic() + given.seconds
    with hosts.Hosts(3) as net:
        expected = undisturbed_losses(net, tools)
        expect(len(expected) == STEPS, f"the undisturbed job has {len(expected)} steps")
        for seed in range(given.seed, given.seed + 1_000_000):
            if time.monotonic() > end:
                break
            print(f"seed {seed}: ", end="", flush=True)
            print("; ".join(one_job(net, tools, expected, random.Random(seed))), flush=True)
    print(f"{seed - given.seed} jobs of {3 * RANKS} ranks have ended with the result of an undisturbed one")


if __name__ == "__main__":
    sys.exit(main())
