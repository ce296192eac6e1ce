"""Trains on hosts whose network misbehaves.

faults.py BUILD_BIN [TEST...]
"""
import signal
import sys
import time

import jobs
from jobs import RANKS, Job, expect, wait_until

SHORT = {"TESSERA_SILENCE_LIMIT": 6}
TESTS, SHAPES = {}, {}


def test(function=None, **shape):
    if function is None:
        return lambda function: test(function, **shape)
    TESTS[function.__name__], SHAPES[function.__name__] = function, shape
    return function


def undisturbed(net, tools, steps):
    return Job(net, tools, steps).start().finish()


def silent(ranks, host, seconds):
    return rf"ranks {ranks} have been silent for {seconds} s \(host 10\.77\.0\.{host + 1}\)"


def expect_cut_named(net, tools, seconds, **limit):
    job = Job(net, tools, 100_000).start(**limit)
    job.wait_for_step(5)
    net.cut(1)
    job.expect_errors([silent("2 and 3", 1, seconds)] * RANKS + [silent("0 and 1", 0, seconds)] * RANKS, 60)


@test
def cut(net, tools):
    """A link that is cut in mid-step is named by all ranks."""
    expect_cut_named(net, tools, 6, **SHORT)


@test
def cut_by_default(net, tools):
    """With the limit that users have, within 60 s."""
    expect_cut_named(net, tools, 30)


@test
def restart(net, tools):
    """A job resumes when a cut link returns, and its result is that of a job that was not disturbed."""
    steps = 60
    expected = undisturbed(net, tools, steps)
    job = Job(net, tools, steps).launch("--max-restarts", 1, "--node-timeout", 8)
    job.wait_for_step(20)
    net.cut(1)
    lost = job.processes[1]
    wait_until(lambda: "to take part in the next attempt" in lost.said(), 60, "node 1 notices that it has lost node 0")
    net.mend(1)
    found = job.finish()
    expect("attempt 2 of 2 begins" in job.processes[0].said(), f"node 0 did not begin again:\n{job.processes[0].said()}")
    expect(found == expected, f"the losses are\n{found}\nbut undisturbed\n{expected}")


@test
def no_restart(net, tools):
    """Without restarts, the launchers on both sides of a cut say what they miss."""
    job = Job(net, tools, 100_000).launch("--node-timeout", 3)
    job.wait_for_step(3)
    net.cut(1)
    job.expect_errors([r"node 1 \(node1\) lost: no sign of life for 3 s", r"launcher of node 0 at node0:\d+ is gone \(.*does not answer"], 40)


@test
def links(net, tools):
    """Delayed, slow and lossy links change no result."""
    steps = 15
    expected = undisturbed(net, tools, steps)
    for shape in ({"delay": 0.01}, {"rate": "100mbit"}, {"loss": 0.02}, {"rate": "200mbit", "delay": 0.002, "loss": 0.005}):
        net.shape(1, **shape)
        found = undisturbed(net, tools, steps)
        expect(found == expected, f"with {shape} the losses are\n{found}\nbut undisturbed\n{expected}")
    net.shape(1)


@test
def short_cut(net, tools):
    """A link that returns in time costs no more than this time."""
    steps = 40
    expected = undisturbed(net, tools, steps)
    job = Job(net, tools, steps).start()
    job.wait_for_step(10)
    net.cut(1)
    time.sleep(4)
    net.mend(1)
    found = job.finish()
    expect(found == expected, f"the losses are\n{found}\nbut undisturbed\n{expected}")


@test
def stopped_rank_is_not_silent(net, tools):
    """The kernel answers for a process that is stopped, or computes, for longer than the limit."""
    steps = 20
    job = Job(net, tools, steps).start(TESSERA_SILENCE_LIMIT=3)
    job.wait_for_step(5)
    job.processes[3].send(signal.SIGSTOP)
    time.sleep(9)
    job.processes[3].send(signal.SIGCONT)
    expect(len(job.finish()) == steps, "a step is missing")


@test
def vanished(net, tools):
    """A host that loses its power is silent."""
    job = Job(net, tools, 100_000).start(**SHORT)
    job.wait_for_step(3)
    net.vanish(1)
    job.expect_errors([silent("2 and 3", 1, 6)] * RANKS + [None] * RANKS, 40)


@test
def vanished_with_the_store(net, tools):
    job = Job(net, tools, 100_000).start(**SHORT)
    job.wait_for_step(3)
    net.vanish(0)
    job.expect_errors([None] * RANKS + [silent("0 and 1", 0, 6)] * RANKS, 40)


@test
def half_open(net, tools):
    """A host that has started anew knows nothing of the connections to it, and says so when it is asked."""
    job = Job(net, tools, 100_000).start()
    job.wait_for_step(3)
    net.vanish(1)
    net.boot(1)
    job.expect_errors([r"ranks? [23].*(closed its connection|silent)"] * RANKS + [None] * RANKS, 60)


@test(count=3)
def cut_between_two(net, tools):
    """Also a rank that reaches everybody learns who does not."""
    job = Job(net, tools, 100_000).start(**SHORT)
    job.wait_for_step(3)
    net.cut(1, 2)
    either = f"({silent('2 and 3', 1, 6)}|{silent('4 and 5', 2, 6)})"
    job.expect_errors([either] * 3 * RANKS, 40)


@test(network="192.168.77")
def names(net, tools):
    """A name that leads to several addresses, of which the first is nobody's, and a host whose own name leads to loopback, which gloo must not
    tell other hosts. Of two addresses gloo connects to the lower one."""
    net.name(1, node0=["192.168.77.9", net[0].address])
    net.name(0, node0="127.0.1.1")
    expect(len(undisturbed(net, tools, 3)) == 3, "a step is missing")


@test
def wrong_names(net, tools):
    """A name that leads astray: the ranks say soon where it leads, and what is there."""
    for address, what in (("10.77.0.9", "nothing answers there|No route to host"), ("10.77.0.2", "Connection refused")):
        net.name(1, node0=address)
        job = Job(net, tools, 3).start()
        lost = job.processes[RANKS]
        wait_until(lambda: f"({address})" in lost.said(), 40, f"rank {RANKS} says that it tries {address}")
        expect(jobs.re.search(rf"can't reach the store at node0:.*({what}) \({address}\)", lost.said()), lost.said())
        for host in net:
            host.kill()


if __name__ == "__main__":
    jobs.run(TESTS, SHAPES)
